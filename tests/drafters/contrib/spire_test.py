"""SPiRE: copies of the target's last layers, what they remember, and rollouts as in use."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import padded
from helpers.models import spread_model
from helpers.numpy_models import numpy_spread_model

import spsjax
from spsjax import InputError, decode, loading
from spsjax.drafters.contrib import spire
from spsjax.models import transformer
from spsjax.verifiers import match

VOCAB, K = 48, 4
PROMPTS = [np.random.default_rng(row).integers(0, VOCAB, 5 + 7 * row).tolist() for row in range(3)]


@functools.cache
def target_of(num_layers=3):
    return numpy_spread_model(VOCAB, num_layers=num_layers, max_positions=128)


@pytest.fixture(scope="module")
def target():
    return target_of()


def copied(target, num_layers, recent, own_input=True):
    """A drafter as training begins; layers may remember their own input alone."""
    drafter = spire.Drafter(target.config, K, num_layers, recent=recent)
    weights = drafting.initial_weights(drafter, target.params)
    kernel = 100 * np.asarray(weights["memory"]["kernel"])
    if not own_input:
        kernel = np.random.default_rng(1).standard_normal(kernel.shape)
    memory = {"kernel": jnp.asarray(kernel, jnp.float32)}
    return loading.LoadedDrafter("spire", drafter, weights | {"memory": memory})


def proposed(target, prompt, loaded):
    """Returns what is proposed after a prompt."""
    program = decode.Program(target.config, loaded.drafter, match.Verifier())
    params = loaded.with_target(target.params)
    return jax.device_get(drafting.proposed_after(program, params, *padded([prompt], 24), 32))


def test_memory_matters_from_the_second_draft_token_on():
    """A copy that remembers its own input knows what the target would of drafted tokens."""
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
        for each in (drafting.initial_weights(drafter, target.params), weights)
    )
    assert after > before + 0.05
