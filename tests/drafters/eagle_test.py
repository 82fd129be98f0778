"""EAGLE's layers, and the objective that trains all drafters of the target's features.

`head_proposals_test` shows that drafting computes what training does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.models import spread_model, tiny_config
from scipy.special import log_softmax

import spsjax
from spsjax import decode
from spsjax.drafters import eagle, eagle3
from spsjax.models import pure
from spsjax.models.context import context_of
from spsjax.training import feature_losses
from spsjax.training.feature_losses import FeatureObjective
from spsjax.training.step import Precision
from spsjax.training.tasks.features import build_drafter
from spsjax.verifiers import rejection

VOCAB = 48
pairs = pytest.mark.parametrize("name", drafting.PAIRS)


def texts_of(count=4, length=13):
    return np.random.default_rng(0).integers(0, VOCAB, (count, length)).astype(np.int32)


def both(name, target):
    drafter, params = drafting.random_head(name, target.config)
    return drafter, {"target": target.params, "drafter": params}


@functools.partial(jax.jit, static_argnums=(0, 3))
def unrolled(drafter, params, tokens, steps):
    """Returns the target's output on texts, its features, and outputs and logits of each step."""
    batch = {"tokens": tokens}
    output = feature_losses.target_output(drafter, params["target"], batch, Precision())
    features = drafter.features(params, output)
    outputs = list(drafter.unrolled(params, tokens[:, 1:], features, steps))
    logits = [drafter.choices(params, each, step).whole() for step, each in enumerate(outputs)]
    return output, features, outputs, logits


def normed(config, scale, x):
    """Returns what `Norm` makes of x, in NumPy."""
    mean_square = np.square(x).mean(-1, keepdims=True)
    return x / np.sqrt(mean_square + config.norm_eps) * (config.norm_offset + np.asarray(scale))


@pairs
def test_layer_reads_each_feature_beside_the_token_after_it(target, name):
    """Index t reads f_t and x_{t+1}, and sees the indices up to t, like the layer by hand."""
    drafter, params = both(name, target)
    weights = jax.tree.map(np.asarray, params["drafter"])
    tokens, config = texts_of(), target.config
    output, features, (outputs,), _ = jax.tree.map(np.asarray, unrolled(drafter, params, tokens, 1))
    embedded = np.asarray(target.params["embed"]["embedding"])[tokens[:, 1:]]
    if name == "eagle":
        np.testing.assert_array_equal(features, output.hidden)
        pair = np.concatenate([embedded, output.hidden], axis=-1)
        stream = read = pair @ weights["fc"]["kernel"] + weights["fc"]["bias"]
        module, shape = eagle.Eagle, drafter.config
    else:
        stream = np.concatenate(output.taps, axis=-1) @ weights["fc"]["kernel"]
        parts = ("embed_norm", embedded), ("feature_norm", stream)
        read = np.concatenate([normed(config, weights[n]["scale"], x) for n, x in parts], axis=-1)
        module, shape = eagle3.Eagle3, drafter

    @jax.jit
    def layer(weights, *arrays):
        positions = jnp.arange(arrays[0].shape[1])[None]
        seen = jnp.asarray(np.tril(np.ones((positions.size,) * 2, bool)))[None]
        context = context_of(positions.size, None, None, positions, seen)
        return pure.bind(module, shape, weights, jnp.float32).layer(*arrays, context, (), None)[0]

    trained = {key: value for key, value in weights.items() if key != eagle3.IDS}
    np.testing.assert_allclose(outputs, layer(trained, stream, read), atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
def test_metrics_are_those_of_the_distributions(target, name):
    """Acceptance and agreement of both steps, computed from whole logits, text by text."""
    drafter, params = both(name, target)
    objective = FeatureObjective(steps=2, decay=0.5, feature=0.0)
    (values,) = drafting.metrics_of(drafter, (objective,), params, texts_of())
    output, _, _, logits = jax.tree.map(np.asarray, unrolled(drafter, params, texts_of(), 2))
    expected = 0
    for step, drafted in enumerate(logits):
        columns = slice(1 + step, None)
        wanted, drafted = output.logits[:, columns], drafted[:, : -1 - step]
        suffix = "_2" if step else ""
        probs = [np.exp(log_softmax(side, axis=-1)) for side in (wanted, drafted)]
        acceptance = np.minimum(*probs).sum(-1)
        np.testing.assert_allclose(values[f"acceptance{suffix}"][:, columns], acceptance, atol=1e-5)
        agreement = np.argmax(wanted, -1) == np.argmax(drafted, -1)
        np.testing.assert_array_equal(values[f"greedy_agreement{suffix}"][:, columns], agreement)
        ids = np.arange(VOCAB) if name == "eagle" else np.asarray(params["drafter"]["ids"])
        logs = [log_softmax(side[..., ids], axis=-1) for side in (wanted, drafted)]
        loss = np.sum(np.exp(logs[0]) * (logs[0] - logs[1]), axis=-1)
        loss *= np.isin(np.argmax(wanted, -1), ids)
        expected += 0.5**step * np.pad(loss, ((0, 0), (1 + step, 0)))
    np.testing.assert_allclose(values["loss"][:, 2:], expected[:, 2:], atol=1e-4)


def test_indices_that_go_on_count_for_those_that_do_not(target):
    """Every third draft is trained beyond its first token, another third in another batch."""
    drafter, params = both("eagle", target)
    objectives, offsets = (FeatureObjective(steps=3), FeatureObjective(steps=3, every=3)), set()
    for text in texts_of(6)[3:]:
        whole, part = jax.tree.map(
            np.asarray, drafting.metrics_of(drafter, objectives, params, text[None])
        )
        np.testing.assert_array_equal(part["acceptance"], whole["acceptance"])
        for step, name in ((1, "acceptance_2"), (2, "acceptance_3")):
            (columns,) = np.nonzero(part[name][0])
            assert len(columns) >= 3 and set(np.diff(columns)) == {3}
            assert columns[-1] > whole[name].shape[1] - 1 - 3  # the end of a text counts, too
            values = 3 * whole[name][:, columns]
            np.testing.assert_allclose(part[name][:, columns], values, atol=1e-5)
            offsets.add(int(columns[0] - 1 - step) % 3)
    assert len(offsets) > 1


def test_gradient_stops_between_detached_steps(target):
    """The second step's outputs have another gradient without the path through the first's."""
    drafter, params = both("eagle", target)
    shape = 2, 1, 6, target.config.d_model
    arrays = np.random.default_rng(2).standard_normal(shape).astype(np.float32)

    @jax.jit
    def gradients(features, weights, following):
        def second(features, detached):
            outputs = list(drafter.unrolled(params, following, features, 2, detached))[1]
            return jnp.vdot(outputs, weights)

        # With and without a path from the first outputs to the second ones.
        return [jax.grad(second)(features, detached) for detached in (False, True)]

    whole, cut = gradients(*arrays, texts_of(1, 7)[:, 1:])
    assert np.abs(np.asarray(whole - cut)).max() > 1e-3


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 8, 12, 32, 80])
def test_default_layers_are_low_middle_and_high(layers):
    low, middle, high = eagle3.default_tap_layers(layers)
    assert 0 <= low <= middle < high <= layers
    if layers >= 12:
        assert (low, middle, high) == (2, layers // 2, layers - 3)
    else:
        assert high == layers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle4"}, "drafter.method: expected blockwise, .*, eagle, .*, found 'eagle4'"),
        ({"method": "eagle", "num_heads": 3}, "num_heads: expected a multiple"),
        ({"method": "eagle", "colour": 1}, "drafter.colour: expected a key of the config"),
        ({"method": "eagle", "tree": 5}, "drafter.tree: expected none"),
        ({"method": "eagle", "d_model": 16}, "d_model: expected the target's 32, found 16"),
        ({"method": "eagle3", "tap_layers": 1}, "tap_layers: expected layers in"),
        ({"method": "eagle3", "vocab_size": True}, "vocab_size: expected"),
        ({"method": "eagle3", "vocab_size": -5}, "vocab_size: expected"),
        ({"method": "eagle3", "vocab_size": 49}, "vocab_size: expected at most the target's 48"),
        ({"method": "eagle3", "fc_norm": "yes"}, "fc_norm: expected True or False"),
    ],
)
def test_config_of_an_odd_drafter_is_refused(options, message):
    with pytest.raises(spsjax.InputError, match=message):
        build_drafter(options, tiny_config(VOCAB))


def test_odd_objectives_are_refused():
    odd = {"steps": 0}, {"decay": -1}, {"detached": 1}, {"divergence": "l2"}, {"token": 0}
    for fields in odd:
        with pytest.raises(spsjax.InputError):
            FeatureObjective(**fields)


def test_noise_depends_on_the_texts_alone():
    noise_of = jax.jit(feature_losses._noise, static_argnums=0)
    tokens, features = texts_of(), np.zeros((4, 12, 8), np.float32)
    noise, again = (np.asarray(noise_of(0.2, tokens, features)) for _ in range(2))
    np.testing.assert_array_equal(noise, again)
    assert 0.05 < np.abs(noise).max() * 12 / 512 <= 0.1
    tokens[0, 0] += 1
    assert np.abs(noise - noise_of(0.2, tokens, features)).max() > 0


def test_head_of_a_target_with_a_tied_head_and_padding():
    """The target's own head gives the logits, whatever its shape."""
    target = spread_model(VOCAB, tie_embeddings=True, padded_vocab_size=56)
    drafter = drafting.head("eagle", target.config)
    params = {"target": target.params, "drafter": drafting.random_weights(drafter)}
    outputs = np.random.default_rng(1).standard_normal((2, 3, target.config.d_model))
    logits = jax.jit(drafter.choices)(params, outputs.astype(np.float32)).whole()
    expected = outputs @ np.asarray(target.params["embed"]["embedding"])[:VOCAB].T
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    program = decode.Program(target.config, drafter, rejection.Verifier())
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    inputs = spsjax.SamplingParams().rows(2), shape((2, 8)), shape((2,)), shape((2,))

    def round_(params, *inputs):  # its shapes fit
        keys = jax.random.split(jax.random.key(0), 2)
        state = decode.prompt.prefill(program, 32, params, *inputs, keys)
        return state, decode.step.step(program, params, state)

    before, after = jax.eval_shape(round_, params, *inputs)
    assert before == after


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": True, "padded_vocab_size": 56}, {"norm_offset": 1.0}]
)
def test_training_of_eagle_3_begins_with_the_targets_head(options):
    """Given the state before the target's final norm, its logits are the target's."""
    target = spread_model(VOCAB, **options)
    config, scale = target.config, np.linspace(0.5, 2, target.config.d_model, dtype=np.float32)
    weights = target.params | {"norm": {"scale": scale}}
    drafter = build_drafter({"method": "eagle3", "vocab_size": 9}, config)
    ids = np.arange(0, 45, 5)
    state = np.random.default_rng(1).standard_normal((2, 3, config.d_model)).astype(np.float32)

    @jax.jit
    def first_logits(weights):
        head = drafter.init_params(jax.random.key(0)) | {"ids": ids}
        head = drafter.from_target(head, {"target": weights, "drafter": {"ids": ids}})
        return drafter.draft_logits({"drafter": head}, state)

    tied = config.tie_embeddings
    kernel = weights["embed"]["embedding"].T if tied else weights["head"]["kernel"]
    expected = normed(config, scale, state) @ np.asarray(kernel)[:, ids]
    np.testing.assert_allclose(first_logits(weights), expected, rtol=1e-4, atol=1e-4)
    narrow = build_drafter({"method": "eagle3", "d_model": 16}, config)
    assert narrow.config.d_model == 16
    assert narrow.from_target({}, {"target": weights, "drafter": {}}) == {}
