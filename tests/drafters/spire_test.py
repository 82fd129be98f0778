"""SPiRE: copies of the target's last layers, what they remember, and rollouts as in use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model, spread_model

import spsjax
from spsjax import DynamicTree, InputError, SamplingParams, Tree, loading
from spsjax.drafters import spire
from spsjax.models import transformer
from spsjax.parallel import sharding

VOCAB, K = 48, 4
PROMPTS = [np.random.default_rng(row).integers(0, VOCAB, 5 + 7 * row).tolist() for row in range(3)]
FAMILIES = {
    "rotary": {},
    "relative": {"positions": "relative", "ffn": "gelu"},
    "gemma": {"post_norms": True, "qk_norm": True, "windows": (9, 0), "rope_theta_local": 1e3},
}


def copied(target, num_layers, recent, own_input=True):
    """A drafter as training begins; layers may remember their own input alone."""
    drafter = spire.Drafter(target.config, K, num_layers, recent=recent)
    weights = drafter.init_params(jax.random.key(0))
    weights = drafter.from_target(weights, {"target": target.params, "drafter": {}})
    if own_input:
        weights["memory"]["kernel"] *= 100
    else:
        key = jax.random.key(1)
        weights["memory"]["kernel"] = jax.random.normal(key, weights["memory"]["kernel"].shape)
    return loading.LoadedDrafter("spire", drafter, weights)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_copy_of_all_layers_is_the_target(family, temperature):
    """With the whole text in its window, and with its own inputs as memory, all is accepted."""
    target = spread_model(VOCAB, num_layers=2, max_positions=128, **FAMILIES[family])
    drafter = copied(target, 2, recent=100)
    options = {"sampling": SamplingParams(temperature), "max_new_tokens": 40, "seed": 1}
    stats = spsjax.generate(target, PROMPTS, drafter, **options).stats
    assert stats.acceptance_rate > 0.98
    assert sum(stats.accepted_histogram[:K]) <= len(PROMPTS)


@pytest.mark.parametrize("later", (None, 3), ids=("all", "some"))
@pytest.mark.parametrize(
    "tree",
    [None, Tree((0, 0, 1, 1, 2, 3, 5)), DynamicTree(9, 4, 3)],
    ids=("chain", "fixed", "dynamic"),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_has_the_distribution_that_training_sees(family, tree, later):
    """The text is longer than sinks and window; rollouts from some indices are those from all."""
    target = spread_model(VOCAB, num_layers=3, max_positions=64, **FAMILIES[family])
    loaded = copied(target, 2, recent=4, own_input=False)
    depth = tree.depth if tree else K
    drafter = dataclasses.replace(loaded.drafter, tree=tree, num_speculative_tokens=depth)
    loaded = dataclasses.replace(loaded, drafter=drafter)
    params = loaded.with_target(target.params)
    prompt = PROMPTS[1]
    proposal = spsjax.propose(target, prompt, loaded)
    paths = drafting.paths(proposal)
    tokens = jnp.asarray([prompt])
    output = transformer.apply(
        target.config, target.params, tokens[:, :-1], tap_layers=drafter.tap_layers
    )
    features, last = drafter.features(params, output), len(prompt) - 2
    chosen = None if later is None else jnp.asarray([0, 2, last])

    @jax.jit
    def logits_after(path):
        """[depth, V] after each part of a path, from the unrolled steps."""
        following = jnp.concatenate([tokens[:, 1:], path[None]], axis=1)[:, : last + 1 + depth]
        padded = jnp.pad(features, ((0, 0), (0, following.shape[1] - last - 1), (0, 0)))
        steps = drafter.unrolled(params, following, padded, depth, later=chosen)
        return jnp.stack(
            [
                drafter.logits(params, each, step)[0, last if chosen is None or not step else 2]
                for step, each in enumerate(steps)
            ]
        )

    for node, path in enumerate(paths):
        if len(path) == depth:
            continue
        logits = logits_after(jnp.pad(jnp.asarray(path, int), (0, depth - len(path))))[len(path)]
        if isinstance(tree, DynamicTree):
            children = {other[-1] for other in paths if other and other[:-1] == path}
            assert children <= {*np.argsort(-logits)[: tree.width].tolist()}
        elif tree is None or node in tree.inner:
            probs = jax.nn.softmax(logits)
            np.testing.assert_allclose(proposal.probs[0, node], probs, atol=2e-5)


def test_memory_matters_from_the_second_draft_token_on():
    """Of committed tokens the target's activations are remembered, whatever is learned."""
    target = spread_model(VOCAB, num_layers=3)
    some, other = (copied(target, 2, 64, own_input) for own_input in (True, False))
    proposals = [spsjax.propose(target, PROMPTS[0], each) for each in (some, other)]
    first, second = (
        np.abs(np.asarray(proposals[0].probs - proposals[1].probs))[0, step].max()
        for step in (0, 1)
    )
    same = int(proposals[0].tokens[0, 0]) == int(proposals[1].tokens[0, 0])
    assert same and first < 1e-6 and second > 1e-4


def test_memory_is_the_mixture_of_the_streams():
    """By hand: shares are a softmax over the streams, from the embedding to the last layer."""
    memory = spire.Memory(2, jnp.float32)
    memory.kernel[...] = jnp.log(jnp.asarray([[1.0, 2.0, 1.0], [3.0, 3.0, 2.0]]))
    streams = [jnp.full((1, 2, 3), value) for value in (4.0, 8.0, 16.0)]
    first, second = memory(streams)
    np.testing.assert_allclose(first, np.full((1, 2, 3), 9.0), rtol=1e-6)
    np.testing.assert_allclose(second, np.full((1, 2, 3), 8.5), rtol=1e-6)


def test_shipped_target_is_copied_from_its_last_layers():
    target = spread_model(VOCAB, num_layers=3)
    drafter = spire.Drafter(target.config)
    assert drafter.tap_layers == (1, 2)
    weights = copied(target, 2, 64).params
    for index, layer in enumerate((1, 2)):
        expected = target.params["layers"][layer]
        assert all(map(np.array_equal, _leaves(weights["layers"][index]), _leaves(expected)))


def _leaves(tree):
    return jax.tree.leaves(tree)


def test_saved_drafter_loads_unchanged(tmp_path):
    target = spread_model(VOCAB, num_layers=3)
    drafter, weights = copied(target, 2, 8).drafter, copied(target, 2, 8).params
    loading.save_drafter(
        tmp_path, loading.LoadedDrafter("", drafter, weights), target, dtype="float32"
    )
    loaded = spsjax.load_drafter(tmp_path, target)
    assert (loaded.drafter.num_layers, loaded.drafter.sinks, loaded.drafter.recent) == (2, 1, 8)
    assert all(map(np.array_equal, _leaves(loaded.params), _leaves(weights)))


def test_mesh_engine_and_hybrid_give_the_text_of_one_device(tmp_path):
    target = spread_model(VOCAB, num_layers=3, max_positions=128)
    loaded = copied(target, 2, recent=8)
    loading.save_drafter(tmp_path, loaded, target, dtype="float32")
    options = {"sampling": SamplingParams(0.0), "max_new_tokens": 24}
    plain = spsjax.generate(target, PROMPTS, **options)
    split = build_model(target.config, target.params, sharding.mesh(2, 2))
    for model, name in ((target, tmp_path), (split, tmp_path), (target, f"suffix+{tmp_path}")):
        drafter = spsjax.load_drafter(name, model)
        out = spsjax.generate(model, PROMPTS, drafter, K, **options)
        assert all(map(np.array_equal, out.tokens, plain.tokens))
    engine = spsjax.Engine(target, spsjax.load_drafter(tmp_path, target), K, rows=2, slots=64)
    requests = [engine.submit(prompt, SamplingParams(0.0), 24) for prompt in PROMPTS]
    for request, tokens in zip(requests, plain.tokens):
        np.testing.assert_array_equal(request.result(), tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 4}, "num_layers: expected at most the target's 3, found 4"),
        ({"num_layers": 0}, "num_layers: expected"),
        ({"recent": 0}, "recent: expected"),
        ({"sinks": -1}, "sinks: expected"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(InputError, match=f"^{message}"):
        spire.Drafter(spread_model(VOCAB, num_layers=3).config, **fields)


def test_training_makes_drafts_better():
    """On random texts of the target: less loss, and a memory that has moved."""
    drafter, weights = drafting.trained_head("spire", spread_model(VOCAB).config)
    assert np.ptp(np.asarray(weights["memory"]["kernel"])) > 0.1
    target = spread_model(VOCAB)
    begun = drafter.from_target(
        drafter.init_params(jax.random.key(0)), {"target": target.params, "drafter": {}}
    )
    before, after = (
        spsjax.generate(
            target, PROMPTS, loading.LoadedDrafter("spire", drafter, each), max_new_tokens=80
        ).stats.acceptance_rate
        for each in (begun, weights)
    )
    assert after > before + 0.05
