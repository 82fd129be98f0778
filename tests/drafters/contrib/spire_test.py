"""SPiRE: copies of the target's last layers, what they remember, and rollouts as in use."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model, spread_model
from helpers.numpy_models import numpy_spread_model

import spsjax
from spsjax import InputError, SamplingParams, Tree, decode, loading
from spsjax.drafters.contrib import spire
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.verifiers import match

VOCAB, K = 48, 4
PROMPTS = [np.random.default_rng(row).integers(0, VOCAB, 5 + 7 * row).tolist() for row in range(3)]
FAMILIES = {
    "rotary": {},  # its nodes are in `head_proposals_test`, its rounds in `contract_test`
    "relative": {"positions": "relative", "ffn": "gelu"},
    "gemma": {"post_norms": True, "qk_norm": True, "windows": (9, 0), "rope_theta_local": 1e3},
}


@functools.cache
def target_of(family="rotary", num_layers=3):
    return numpy_spread_model(VOCAB, num_layers=num_layers, max_positions=128, **FAMILIES[family])


@pytest.fixture(scope="module")
def target():
    return target_of()


def copied(target, num_layers, recent, own_input=True):
    """A drafter as training begins; layers may remember their own input alone."""
    drafter = spire.Drafter(target.config, K, num_layers, recent=recent)
    weights = drafting.begun(drafter, target.params)
    kernel = 100 * np.asarray(weights["memory"]["kernel"])
    if not own_input:
        kernel = np.random.default_rng(1).standard_normal(kernel.shape)
    memory = {"kernel": jnp.asarray(kernel, jnp.float32)}
    return loading.LoadedDrafter("spire", drafter, weights | {"memory": memory})


@pytest.mark.slow
def test_copy_of_all_layers_is_the_target():
    """With the whole text in its window, and with its own inputs as memory, all is accepted."""
    target = target_of("relative", 2)
    drafter = copied(target, 2, recent=100)
    options = {"sampling": SamplingParams([0.0, 1.0, 0.7]), "max_new_tokens": 40, "seed": 1}
    stats = spsjax.generate(target, PROMPTS, drafter, **options).stats
    assert stats.acceptance_rate > 0.98
    assert sum(stats.accepted_histogram[:K]) <= len(PROMPTS)


@functools.partial(jax.jit, static_argnums=0)
@drafting.small
def _proposed(program, params, tokens, lengths):
    rows, keys = SamplingParams().rows(1), jax.random.split(jax.random.key(3), 1)
    state = decode.prefill(program, 32, params, rows, tokens, lengths, lengths + 8, keys)
    state, now = decode.next_round(program, params, state)
    return dataclasses.replace(decode.propose(program, params, state, now), aux=())


def proposed(target, prompt, loaded):
    """Returns what is proposed after a prompt."""
    program = decode.Program(target.config, loaded.drafter, match.Verifier())
    tokens, lengths = np.asarray([prompt], np.int32), np.asarray([len(prompt)], np.int32)
    proposal = _proposed(program, loaded.with_target(target.params), tokens, lengths)
    return jax.tree.map(np.asarray, proposal)


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits_after(drafter, depth, params, texts, last, later):
    """Returns [R, depth, V] after each part of the paths behind a prompt, from unrolled steps."""
    output = transformer.apply(
        drafter.target, params["target"], texts[:, :-1], tap_layers=drafter.tap_layers
    )
    features = drafter.features(params, output)
    features = jnp.where(jnp.arange(features.shape[1])[:, None] <= last, features, 0)
    logits = []
    for step, outputs in enumerate(
        drafter.unrolled(params, texts[:, 1:], features, depth, later=later)
    ):
        index = jnp.searchsorted(later, last) if step and later is not None else last
        logits.append(drafter.logits(params, outputs, step)[:, index])
    return jnp.stack(logits, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tree", "later"),
    [("relative", None, "some"), ("gemma", Tree((0, 0, 1, 1, 2, 3, 5)), "all")],
    ids=("relative", "gemma"),
)
def test_every_node_has_the_distribution_that_training_sees(family, tree, later):
    """The text is longer than sinks and window; rollouts from some indices are those from all."""
    target, prompt = target_of(family), PROMPTS[1]
    loaded = copied(target, 2, recent=4, own_input=False)
    depth, last = tree.depth if tree else K, len(prompt) - 2
    drafter = dataclasses.replace(loaded.drafter, tree=tree, num_speculative_tokens=depth)
    loaded = dataclasses.replace(loaded, drafter=drafter)
    proposal = proposed(target, prompt, loaded)
    paths = drafting.paths(proposal)
    texts = np.zeros((10, 24), np.int32)
    for node, path in enumerate(paths):
        texts[node, : len(prompt) + len(path)] = [*prompt, *path]
    chosen = None if later == "all" else np.asarray([0, 2, last])
    chain = dataclasses.replace(drafter, tree=None)
    logits = np.asarray(
        logits_after(chain, depth, loaded.with_target(target.params), texts, last, chosen)
    )
    for node, path in enumerate(paths):
        if len(path) == depth:
            continue
        if tree is None or node in tree.inner:
            line = logits[node, len(path)]
            probs = np.exp(line - line.max())
            np.testing.assert_allclose(proposal.probs[0, node], probs / probs.sum(), atol=2e-5)


def test_memory_matters_from_the_second_draft_token_on():
    """Of committed tokens the target's activations are remembered, whatever is learned.

    Of drafted ones a copy that remembers its own input knows what the target would.
    """
    target = target_of(num_layers=2)
    some, other = (copied(target, 2, 64, own_input) for own_input in (True, False))
    proposals = [proposed(target, PROMPTS[0], each) for each in (some, other)]
    first, second = (
        np.abs(np.asarray(proposals[0].probs - proposals[1].probs))[0, step].max()
        for step in (0, 1)
    )
    same = int(proposals[0].tokens[0, 0]) == int(proposals[1].tokens[0, 0])
    assert same and first < 1e-6 and second > 1e-4
    text = np.asarray([[*PROMPTS[0], *proposals[0].tokens[0]]])
    run = jax.jit(transformer.apply, static_argnums=0)
    logits = np.asarray(run(target.config, target.params, text).logits)[0, -K - 1 : -1]
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(proposals[0].probs[0], probs, atol=1e-5)


def test_memory_is_the_mixture_of_the_streams():
    """By hand: shares are a softmax over the streams, from the embedding to the last layer."""
    memory = spire.Memory(2, jnp.float32)
    memory.kernel[...] = jnp.log(jnp.asarray([[1.0, 2.0, 1.0], [3.0, 3.0, 2.0]]))
    streams = [jnp.full((1, 2, 3), value) for value in (4.0, 8.0, 16.0)]
    first, second = memory(streams)
    np.testing.assert_allclose(first, np.full((1, 2, 3), 9.0), rtol=1e-6)
    np.testing.assert_allclose(second, np.full((1, 2, 3), 8.5), rtol=1e-6)


def test_shipped_target_is_copied_from_its_last_layers(target):
    drafter = spire.Drafter(target.config)
    assert drafter.tap_layers == (1, 2)
    weights = copied(target, 2, 64).params
    for index, layer in enumerate((1, 2)):
        expected = target.params["layers"][layer]
        assert all(map(np.array_equal, _leaves(weights["layers"][index]), _leaves(expected)))


def _leaves(tree):
    return jax.tree.leaves(tree)


def test_saved_drafter_loads_unchanged(target, tmp_path):
    saved = copied(target, 2, 8)
    loading.save_drafter(tmp_path, saved, target, dtype="float32")
    loaded = spsjax.load_drafter(tmp_path, target)
    assert (loaded.drafter.num_layers, loaded.drafter.sinks, loaded.drafter.recent) == (2, 1, 8)
    assert all(map(np.array_equal, _leaves(loaded.params), _leaves(saved.params)))


@pytest.mark.slow
def test_drafter_on_a_mesh_gives_the_text_of_one_device(target, tmp_path):
    """Its copies are split like the target's layers."""
    loading.save_drafter(tmp_path, copied(target, 2, recent=8), target, dtype="float32")
    options = {"sampling": SamplingParams(0.0), "max_new_tokens": 24}
    split = build_model(target.config, target.params, sharding.mesh(2, 2))
    out = spsjax.generate(split, PROMPTS, spsjax.load_drafter(tmp_path, split), K, **options)
    plain = spsjax.generate(target, PROMPTS, **options)
    assert all(map(np.array_equal, out.tokens, plain.tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 4}, "num_layers: expected at most the target's 3, found 4"),
        ({"num_layers": 0}, "num_layers: expected"),
        ({"recent": 0}, "recent: expected"),
        ({"sinks": -1}, "sinks: expected"),
    ],
)
def test_bad_fields_are_refused(target, fields, message):
    with pytest.raises(InputError, match=f"^{message}"):
        spire.Drafter(target.config, **fields)


@pytest.mark.training
def test_training_makes_drafts_better():
    """On random texts of the target: less loss, and a memory that has moved."""
    target = spread_model(VOCAB)
    drafter, weights = drafting.trained_head("spire", target.config, 150)
    assert np.ptp(np.asarray(weights["memory"]["kernel"])) > 0.1
    before, after = (
        spsjax.generate(
            target, PROMPTS, loading.LoadedDrafter("spire", drafter, each), max_new_tokens=80
        ).stats.acceptance_rate
        for each in (drafting.begun(drafter, target.params), weights)
    )
    assert after > before + 0.05
