"""Tests of the drafter contract, for every drafter of the package and of the tests.

This is the loop's share of the proof that sampling is lossless: after a round everything is as
after a fresh prefill. The distribution of a draft is tested in `draws_test`, that of a verdict in
`exactness_test`, and that of whole texts in `whole_texts_test` and `sampled_texts_test`.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import assert_same_texts, padded
from helpers.models import build_model

import spsjax
from spsjax import SamplingParams, decode, sampling
from spsjax.parallel import sharding
from spsjax.utils.compilation import compiled

K, NEW = 3, 20
# Prompts repeat themselves, so that n-grams match. Their lengths differ, and one is a single token.
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
MIXED = SamplingParams(
    temperature=[1.0, 0.0, 0.7, 1.3], top_k=[0, 0, 5, 0], top_p=[1.0, 1.0, 1.0, 0.9003]
)
GREEDY = SamplingParams(temperature=0.0)
TEXTS = {"max_new_tokens": NEW, "stop_at_eos": False}  # the loop of `beginning`
# One of each kind of state, which the gate tests: the others derive from the same bases. Those
# without a state follow from `loop_test`, which compares n-grams with the oracle.
REPRESENTATIVES = "draft_model", "eagle3", "medusa", "random_tree"
FILTERED = "draft_model"  # the one with filters, which are the same code for all drafters


def case(*values):
    """Returns a case of a drafter: its group, so that tests share its programs, and its tier."""
    marks = [pytest.mark.xdist_group(f"contract {values[-1]}")]
    if values[-1] not in REPRESENTATIVES:
        marks.append(pytest.mark.slow)
    return pytest.param(*values, marks=marks)


def drafters(*names):
    return pytest.mark.parametrize("name", [case(name) for name in names])


every_drafter = drafters(*drafting.NAMES)


@pytest.fixture(autouse=True)
def small_programs(name):
    """Compiles small what is not about filters."""
    with contextlib.nullcontext() if name == FILTERED else drafting.small_programs():
        yield


@pytest.fixture(scope="module")
def greedy_texts(target):
    """Texts of greedy autoregressive sampling."""
    return spsjax.generate(target, PROMPTS, sampling=GREEDY, **TEXTS).tokens


def speculate(name, target, draft, prompts=PROMPTS, **options):
    """Generates with the drafter `name`, its verifier, and mixed sampling by default."""
    options = {"sampling": MIXED, **TEXTS, **options}
    drafter = drafting.build(name, draft, K)
    out = spsjax.generate(target, prompts, drafter, verifier=drafting.verifier(name), **options)
    # Other systems emitted ids of padding, or the size of the vocabulary.
    assert all((tokens >= 0).all() and (tokens < 48).all() for tokens in out.tokens)
    return out


def beginning(name, target, draft):
    """Returns the arguments of `decode.step.step`: program, parameters, state with stale tokens."""
    loaded = drafting.build(name, draft, K)
    program = decode.Program(target.config, loaded.drafter, drafting.verifier(name))
    params = {"target": target.params, "drafter": loaded.params}
    tokens, lengths = padded(PROMPTS, 32, seed=0)
    keys = sampling.row_keys(jax.random.key(0), 4)
    state = fresh(program, params, tokens, lengths, np.full(4, 28, np.int32), keys)
    return program, params, state


def fresh(program, params, tokens, lengths, limits, keys):
    """Returns the state after a prefill of these tokens."""
    inputs = jax.device_put((MIXED.rows(4), tokens, lengths, limits))
    return compiled(decode.prompt.prefill, program, 32)(params, *inputs, keys)[0]


@every_drafter
def test_drafter_is_hashable_and_holds_no_arrays(draft, name):
    drafter = drafting.build(name, draft, K).drafter
    same = drafting.build(name, draft, K).drafter
    assert drafter == same and hash(drafter) == hash(same)
    assert not any(isinstance(leaf, jax.Array) for leaf in vars(drafter).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        drafter.num_speculative_tokens = 5


@every_drafter
def test_greedy_speculation_equals_greedy_decoding(target, draft, greedy_texts, name):
    out = speculate(name, target, draft, sampling=GREEDY)
    assert_same_texts(out.tokens, greedy_texts)
    assert len({tuple(tokens) for tokens in out.tokens}) == len(PROMPTS)


@pytest.mark.parametrize(
    ("same", "name"),
    [
        *(case(False, name) for name in drafting.NAMES if name not in drafting.WITH_HISTORY),
        case(True, "draft_model"),
    ],
)
def test_state_after_commit_equals_a_fresh_prefill(target, draft, name, same):
    """After every round, for any number of accepted tokens; if draft == target, all are."""
    draft = build_model(draft.config, target.params, None) if same else draft
    program, params, state = beginning(name, target, draft)
    run = compiled(decode.step.run, program, donate=1)
    limits = np.asarray(state.limits)
    for round_ in range(5):
        keys = jax.random.key_data(decode.step.round_keys(state))
        state, _ = run(params, state, np.int32(1))
        tokens, lengths, done = map(np.asarray, (state.tokens, state.lengths, state.done))
        np.testing.assert_array_equal(state.cache.lengths, lengths - 1)
        # A round has keys of its own.
        changed = jax.random.key_data(decode.step.round_keys(state)) != keys
        assert (changed.any(axis=1) | done).all()
        # Tokens beyond the committed ones may have any value.
        noise = np.random.default_rng(round_).integers(0, 48, tokens.shape)
        valid = np.arange(noise.shape[1]) < lengths[:, None]
        tokens = np.where(valid, tokens, noise).astype(np.int32)
        again = fresh(program, params, tokens, lengths, limits, state.keys)
        (proposal, logits), (expected, expected_logits) = (
            future(program, params, state),
            future(program, params, again),
        )
        np.testing.assert_array_equal(proposal.tokens, expected.tokens)
        np.testing.assert_allclose(logits, expected_logits, atol=1e-4)
        assert proposal.tokens.dtype == jnp.int32
        if proposal.probs is not None:
            assert proposal.probs.dtype == jnp.float32
            np.testing.assert_allclose(proposal.probs, expected.probs, atol=1e-4)
    accepted = np.asarray(state.accepted).sum(axis=0)
    if name == "random_tree":
        assert np.count_nonzero(accepted) > 2
    if name in drafting.HEADS:
        assert np.count_nonzero(accepted) > 1
    if name == "draft_model":
        assert accepted[K] == accepted.sum() if same else np.count_nonzero(accepted) > 2


def future(program, params, state):
    """Returns the next proposal, without filters, and the target's logits on it."""
    return compiled(next_round, program)(params, state)[0]


@drafting.small
def next_round(program, params, state):
    state, now = decode.step.next_round(program, params, state)
    now = dataclasses.replace(now, keys=state.keys)
    proposal = decode.step.propose(program, params, state, now)
    return dataclasses.replace(proposal, aux=()), decode.step.score(
        program, params, state, proposal
    ).logits


@every_drafter
def test_rows_do_not_depend_on_each_other(target, draft, name):
    out = speculate(name, target, draft, seed=5)
    assert not np.array_equal(out.tokens[0][:4], out.tokens[2][:4])
    # The other rows have other lengths and acceptances. Row 0 keeps its key.
    mates = [PROMPTS[0], [40] * 8, [11, 12], [13, 14, 13]]
    other = speculate(name, target, draft, mates, seed=5)
    np.testing.assert_array_equal(other.tokens[0], out.tokens[0])


@every_drafter
def test_second_call_compiles_nothing(target, draft, name):
    """A call with other prompts, sampling parameters, budgets and seed compiles nothing."""
    speculate(name, target, draft)
    out = speculate(
        name,
        target,
        draft,
        prompts=[[1], [2, 3, 4, 5], [6] * 8, [7, 7]],
        sampling=SamplingParams(temperature=0.5, top_p=0.7, min_p=0.1),
        max_new_tokens=[3, 20, 5, 11],
        seed=3,
    )
    assert out.stats.compile_seconds == 0


@pytest.mark.slow
@drafters("windowed", "eagle", "early_exit", "successors", "tli")
def test_eight_devices_give_the_tokens_of_one(target, draft, name):
    """A split draft, a split target's features, its first layers and its own logits."""
    on_mesh = functools.partial(build_model, mesh=sharding.mesh(2, 4))
    many = [on_mesh(model.config, model.params) for model in (target, draft)]
    out = speculate(name, *many, seed=1)
    assert_same_texts(out.tokens, speculate(name, target, draft, seed=1).tokens)
    weights = many[0].params["layers"][0]["ffn"]["up"]["kernel"]
    assert len(weights.sharding.device_set) == 8 and not weights.is_fully_replicated
