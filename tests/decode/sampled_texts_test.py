"""The compiled sampler against the exact joint distribution, by G-tests with fixed seeds.

`whole_texts_test` proves the distribution of a round for ideal random numbers, in float64. These
tests use the real random numbers, float32, the cache, and many rounds, with a chain, a tree and a
drafter of features. They fail if a key is used twice.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting, reference
from helpers.environment import FAST
from helpers.g_test import SUSPICIOUS, g_test, perturbed
from helpers.models import logits_of

import spsjax
from spsjax import SamplingParams, loading, sampling
from spsjax.verifiers.lenience import lenient_distribution

pytestmark = pytest.mark.usefixtures("exact_buffers")
ROWS, SEEDS, NEW = 8192, 2, 3
PROMPT = [1, 2, 1]
# Row b samples with MIX[b % 8], so that one batch has greedy and sampled rows.
MIX = (
    *({},) * 5,
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8003, "min_p": 0.1003},
)


def counts_of(model, drafter, verifier):
    """Samples a mixed batch per seed, and returns index into MIX -> counts of sequences."""
    rows = [vars(SamplingParams(**MIX[row % len(MIX)])) for row in range(ROWS)]
    params = SamplingParams(**{name: [row[name] for row in rows] for name in rows[0]})
    counts = collections.defaultdict(collections.Counter)
    for seed in range(SEEDS):
        out = spsjax.generate(
            model, [PROMPT] * ROWS, drafter, None, params, NEW, seed, verifier=verifier
        )
        for row, tokens in enumerate(out.tokens):
            kind = row % len(MIX)
            counts[MIX.index(MIX[kind])][tuple(tokens.tolist())] += 1
    return counts


@pytest.fixture(scope="module")
def exact(small_target):
    """The target's joint distributions: index into MIX -> distribution."""
    model, limit = logits_of(small_target), len(PROMPT) + NEW
    return {
        MIX.index(params): reference.joint_distribution(model, PROMPT, limit, **params)
        for params in MIX
    }


def unfiltered_counts(model, drafter, K=2):
    """Returns counts of sequences of rows that are sampled without filters."""
    with drafting.small_programs():
        out = spsjax.generate(model, [PROMPT] * (3 * ROWS // 2), drafter, K, max_new_tokens=NEW)
    return collections.Counter(tuple(tokens.tolist()) for tokens in out.tokens)


def test_unfiltered_texts_have_the_target_joint_distribution(small_target, small_draft, exact):
    """Samples with a draft model pass a G-test, which an error of one hundredth of mass fails."""
    counts = unfiltered_counts(small_target, small_draft)
    assert g_test(counts, exact[0]) > SUSPICIOUS
    assert g_test(counts, perturbed(exact[0])) < SUSPICIOUS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "eagle3", "random_tree"])
def test_generate_samples_the_target_joint_distribution(small_target, small_draft, exact, name):
    """Mixed samples pass a G-test, which an error of one hundredth of mass fails."""
    drafter = drafting.build(name, small_draft, 2)
    counts = counts_of(small_target, drafter, drafting.verifier(name))
    for kind, distribution in exact.items():
        assert g_test(counts[kind], distribution) > SUSPICIOUS, MIX[kind]
    # The greedy rows have one sequence.
    assert set(counts[5]) == set(exact[5]) and len(exact[5]) == 1
    # An error of one hundredth would fail the test.
    assert g_test(counts[0], perturbed(exact[0])) < SUSPICIOUS


@pytest.mark.slow
def test_int8_drafts_and_targets_are_sampled_exactly(small_target, small_draft, exact):
    """A target in int8 has a distribution of its own, and texts have it with drafts in int8."""
    target, draft = (
        loading.quantized(model, "int8_dynamic") for model in (small_target, small_draft)
    )
    own = reference.joint_distribution(logits_of(target), PROMPT, len(PROMPT) + NEW)
    assert g_test(unfiltered_counts(target, draft), own) > SUSPICIOUS
    assert max(abs(own[text] - exact[0][text]) for text in own) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("fault", ("one number for every role", "one key for every round"))
def test_reused_randomness_is_rejected(monkeypatch, small_target, small_draft, exact, fault):
    """The G-test fails if roles share their numbers, or if rounds share a key."""
    uniforms = sampling.uniforms

    def broken(keys, role, count):
        if fault == "one number for every role":
            return uniforms(keys, 0, count)
        return uniforms(sampling.row_keys(jax.random.key(0), len(keys)), role, count)

    monkeypatch.setattr(sampling, "uniforms", broken)
    # Another context, which changes no token, has the broken program compiled separately.
    config = dataclasses.replace(small_target.config, max_positions=300 + len(fault))
    model = dataclasses.replace(small_target, config=config)
    assert g_test(unfiltered_counts(model, small_draft, 1), exact[0]) < SUSPICIOUS


def test_draw_from_several_blocks_follows_the_weights():
    """With several blocks of tokens the two numbers of a draw must be independent."""
    vocab, draws = 300, 100_000
    weights = np.random.default_rng(0).permutation(np.arange(1, vocab + 1) ** -1.5)
    keys = sampling.row_keys(jax.random.key(0), draws)
    uniforms = sampling.uniforms(keys, sampling.NEXT, 2)
    draw = functools.partial(sampling.draw, jnp.asarray(weights, jnp.float32))
    draw = jax.jit(functools.partial(jax.lax.map, draw, batch_size=1000), compiler_options=FAST)
    tokens = np.asarray(draw(uniforms))
    counts = collections.Counter(tokens.tolist())
    distribution = dict(enumerate(weights / weights.sum()))
    assert g_test(counts, distribution) > SUSPICIOUS
    assert g_test(counts, perturbed(distribution)) < SUSPICIOUS


@pytest.mark.parametrize(("lenience", "dtype"), [(1.0, jnp.float32), (0.6, jnp.bfloat16)])
def test_rejection_sample_has_the_exact_distribution(lenience, dtype):
    """Tokens of `rejection_sample` follow the lenient joint distribution in both types."""
    rng = np.random.default_rng(3)
    rows, K, V = 200_000, 2, 3
    # Probabilities are multiples of 1/64, which bfloat16 holds exactly.
    draft_probs = (1 + rng.multinomial(61, rng.dirichlet(np.ones(V)), K)) / 64
    target_probs = (1 + rng.multinomial(61, rng.dirichlet(np.ones(V)), K + 1)) / 64
    drafts = [rng.choice(V, rows, p=probs) for probs in draft_probs]
    tokens, number = spsjax.rejection_sample(
        jax.random.key(0),
        np.stack(drafts, axis=1),
        np.broadcast_to(draft_probs, (rows, K, V)).astype(dtype),
        np.broadcast_to(target_probs, (rows, K + 1, V)).astype(dtype),
        lenience,
    )
    assert tokens.shape == (rows, K + 1) and tokens.dtype == number.dtype == jnp.int32
    tokens, number = np.asarray(tokens), np.asarray(number)
    assert ((tokens >= 0) == (np.arange(K + 1) < number[:, None])).all()
    blocks, times = np.unique(tokens, axis=0, return_counts=True)
    counts = {tuple(block[block >= 0].tolist()): count for block, count in zip(blocks, times)}
    # Accepted tokens have the mass that both distributions share. The next token is drawn from
    # what is left of the target.
    distribution, reached = {}, {(): 1.0}
    for k in range(K + 1):
        draft = draft_probs[k] if k < K else np.zeros(V)
        shared = np.minimum(draft, target_probs[k] / lenience)
        left = np.maximum(target_probs[k] - lenience * draft, 0)
        left *= (1 - shared.sum()) / left.sum()
        distribution |= {(*past, z): m * left[z] for past, m in reached.items() for z in range(V)}
        reached = {(*past, y): m * shared[y] for past, m in reached.items() for y in range(V)}
    distribution = {block: mass for block, mass in distribution.items() if mass > 0}
    assert abs(sum(distribution.values()) - 1) < 1e-12
    assert g_test(counts, distribution) > SUSPICIOUS
    assert g_test(counts, perturbed(distribution)) < SUSPICIOUS
    first = {(z,): np.count_nonzero(tokens[:, 0] == z) for z in range(V)}
    expected = lenient_distribution(draft_probs[0], target_probs[0], lenience)
    assert g_test(first, {(z,): float(expected[z]) for z in range(V)}) > SUSPICIOUS


@pytest.mark.slow
@pytest.mark.parametrize("method", ("traversal", "kseq"))
def test_tree_verify_has_the_exact_distribution(method):
    """Trees are drawn by NumPy; emitted tokens follow the target's joint distribution."""
    rng = np.random.default_rng(4)
    rows, V, replacement = 100_000, 3, method == "kseq"
    # What follows a node depends on its token; two children of the root, one below each.
    draft, target = (rng.dirichlet(np.ones(V), V + 1).astype(np.float32) for _ in range(2))

    def drawn(probs):
        return np.argmax(np.log(probs) + rng.gumbel(size=probs.shape), axis=-1)

    first = drawn(np.broadcast_to(draft[V], (rows, V)))
    left = draft[V] * (replacement | (np.arange(V) != first[:, None])) + 1e-30
    tokens = np.stack([first, drawn(left)], axis=1)
    tokens = np.concatenate([tokens, drawn(draft[tokens])], axis=1)
    context = np.concatenate([np.full((rows, 1), V), tokens], axis=1)
    parents = np.broadcast_to([0, 0, 1, 2], tokens.shape)
    emitted, number, _ = spsjax.tree_verify(
        jax.random.key(1),
        tokens,
        parents,
        draft[context[:, :3]],
        target[context],
        method,
        replacement,
    )
    emitted, number = np.array(emitted), np.asarray(number)
    assert emitted.shape == (rows, 3) and set(number.tolist()) == {1, 2, 3}
    for k in (1, 2):  # texts of three tokens: what is missing is drawn from the target
        emitted[:, k] = np.where(number > k, emitted[:, k], drawn(target[emitted[:, k - 1]]))
    counts = collections.Counter(map(tuple, emitted.tolist()))
    distribution = {
        (x, y, z): float(target[V, x] * target[x, y] * target[y, z])
        for x in range(V)
        for y in range(V)
        for z in range(V)
    }
    assert g_test(counts, distribution) > SUSPICIOUS
    assert g_test(counts, perturbed(distribution)) < SUSPICIOUS
