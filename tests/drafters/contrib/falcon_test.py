"""Falcon: units of several tokens, their masks, and glancing.

Its drafts, trees and folders are in `head_proposals_test` and `head_folders_test`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.numpy_models import numpy_spread_model

import spsjax
from spsjax.drafters.contrib import falcon
from spsjax.models import pure, transformer
from spsjax.models.context import context_of
from spsjax.training import feature_losses
from spsjax.training.feature_losses import FeatureObjective
from spsjax.training.step import Precision
from spsjax.types import Chunk

VOCAB = 48


@pytest.fixture(scope="module")
def target():
    return numpy_spread_model(VOCAB)


def made(target, k):
    """A drafter with weights that are large enough for its tokens to matter."""
    drafter = drafting.head("falcon", target.config, tokens_per_step=k)
    return drafter, {"target": target.params, "drafter": drafting.random_weights(drafter)}


run_target = jax.jit(transformer.apply, static_argnums=0)


def text_of(target, length=12, seed=1):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (1, length))
    return tokens, run_target(target.config, target.params, tokens).hidden[:, :-1]


def lstm(weights, x):
    """Outputs [T, D] of the layers, in NumPy, step by step."""

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    for number in range(falcon.LSTM_LAYERS):
        layer = jax.tree.map(np.asarray, weights["lstm"]["layers"][number])
        hidden, memory, outputs = 0.0, 0.0, []
        for row in x:
            gates = row @ layer["read"]["kernel"] + layer["read"]["bias"]
            gates = gates + np.dot(hidden * np.ones(len(gates) // 4), layer["keep"]["kernel"])
            enter, forget, cell, leave = np.split(gates, 4)
            memory = sigmoid(forget + 1) * memory + sigmoid(enter) * np.tanh(cell)
            hidden = sigmoid(leave) * np.tanh(memory)
            outputs.append(hidden)
        x = np.stack(outputs)
    return x


def layer_outputs(drafter, params, read, ancestors):
    """Outputs [T, D] of the decoder layer over what it reads, with a mask by hand."""
    padded, seen = np.zeros((12, read.shape[1]), np.float32), np.eye(12, dtype=bool)
    padded[: len(read)], seen[: len(read), : len(read)] = read, ancestors
    return np.asarray(_layer_outputs(drafter.config, params["drafter"], padded, seen))[: len(read)]


@functools.partial(jax.jit, static_argnums=0)
def _layer_outputs(config, weights, read, ancestors):
    module = pure.bind(falcon.Falcon, config, weights, jnp.float32)
    context = context_of(len(read), None, None, jnp.arange(len(read))[None], ancestors[None])
    return module.layer(read[None], read[None], context, (), None)[0][0]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_units_are_those_of_the_paper(target, k):
    """A unit sees all pairs up to its last one. With k = 1 this is EAGLE-1 with an LSTM."""
    drafter, params = made(target, k)
    tokens, features = text_of(target)
    embedded = np.asarray(target.params["embed"]["embedding"])[tokens[:, 1:]]
    read = lstm(params["drafter"], np.concatenate([embedded[0], features[0]], axis=1))
    unrolled = jax.jit(lambda *arrays: list(drafter.unrolled(params, *arrays, k)))
    outputs = unrolled(tokens[:, 1:], features)
    for t in range(k - 1, len(read), 3):
        # Rows before the unit are causal. Its own see each other.
        sees = np.tril(np.ones((t + 1, t + 1), bool))
        sees[t + 1 - k :] = True
        expected = layer_outputs(drafter, params, read[: t + 1], sees)
        for slot in range(k):
            actual = outputs[slot][0, t]
            np.testing.assert_allclose(actual, expected[t + 1 - k + slot], atol=1e-4)


def test_prompts_in_chunks_that_overlap_end_in_the_same_state(target):
    """The last chunk repeats pairs, which must not run through the LSTM again."""
    drafter, params = made(target, 2)
    tokens, _ = text_of(target, 12)
    following = np.roll(tokens, -1, axis=1)
    output = jax.tree.map(np.asarray, run_target(target.config, target.params, tokens))
    prefill = jax.jit(functools.partial(drafter.prefill, params))
    empty = drafter.init(params, 1, 16)

    def read(chunks, length):
        state = empty
        for start, width in chunks:
            part = slice(start, start + width)
            seen = dataclasses.replace(output, hidden=output.hidden[:, part])
            where = np.asarray([start]), np.asarray([length])
            state = prefill(state, Chunk(tokens[:, part], following[:, part], *where, None), seen)
        return state

    for length in (12, 9, 5, 2, 1):
        whole, parts = read([(0, 12)], length), read([(0, 5), (5, 5), (7, 5)], length)
        assert int(whole.cache.lengths[0]) == int(parts.cache.lengths[0]) == length - 1
        np.testing.assert_allclose(parts.read, whole.read, atol=1e-5)
        np.testing.assert_allclose(parts.carry, whole.carry, atol=1e-5)
        for name in ("keys", "values"):
            ours, theirs = (np.asarray(getattr(s.cache, name)[0]) for s in (parts, whole))
            np.testing.assert_allclose(
                ours[:, :, : length - 1], theirs[:, :, : length - 1], atol=1e-5
            )


def test_glanced_drafts_read_the_pair_of_k_tokens_later(target):
    """Their outputs are those of a text whose pair was replaced; the others stay."""
    drafter, params = made(target, 2)
    tokens, features = text_of(target)
    following, t = tokens[:, 1:], 6
    features, nothing = np.asarray(features), np.zeros(following.shape, bool)
    glanced = nothing.copy()
    glanced[0, t] = True

    @jax.jit
    def unrolled(following, features, glanced=None):
        steps = drafter.unrolled(params, following, features, 2, glanced=glanced)
        return list(steps)

    plain, shown, silent = (
        [np.asarray(step) for step in unrolled(following, features, mask)]
        for mask in (None, glanced, nothing)
    )
    np.testing.assert_allclose(silent, plain, atol=1e-6)
    # The unit of t has the pairs t - 1 and t; t - 1 is replaced by t + 1.
    replaced, tokens = features.copy(), following.copy()
    replaced[0, t - 1], tokens[0, t - 1] = features[0, t + 1], following[0, t + 1]
    expected = unrolled(tokens, replaced)
    for step in range(2):
        np.testing.assert_allclose(shown[step][0, t], expected[step][0, t], atol=1e-5)
        others = np.arange(following.shape[1]) != t
        np.testing.assert_allclose(shown[step][0, others], plain[step][0, others], atol=1e-5)
    assert np.abs(shown[1][0, t] - plain[1][0, t]).max() > 1e-3


def test_glancing_counts_wrong_tokens_and_drops_the_shown_answers(target):
    """With a decay of 0 the loss is that of the first tokens, of which the shown ones have none."""
    drafter, params = made(target, 2)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (1, 40))
    frozen, losses = {"target": target.params, "drafter": {}}, []
    for glance in (0.0, 0.25):
        objective = FeatureObjective(steps=2, feature=1.0, decay=0.0, glance=glance)
        metrics = jax.jit(feature_losses.feature_metrics(drafter, objective, Precision()))
        values = jax.tree.map(np.asarray, metrics(params["drafter"], frozen, {"tokens": tokens}))
        losses.append(values["loss"][0, 1:])
        if not glance:
            names = "greedy_agreement", "greedy_agreement_2"
            wrong = 38 + 37 - sum(float(values[name].sum()) for name in names)
    assert np.all(losses[0] > 0)
    shown = losses[1] == 0
    assert 0 < shown.sum() <= np.ceil(0.25 * wrong)
    np.testing.assert_allclose(losses[1][~shown], losses[0][~shown], rtol=1e-4)


def test_odd_sizes_are_refused(target):
    config = target.config
    with pytest.raises(spsjax.InputError, match="tokens_per_step: expected an integer >= 1"):
        falcon.Drafter(config, config, tokens_per_step=0)
    with pytest.raises(spsjax.InputError, match="d_model: expected the target's 32, found 16"):
        falcon.Drafter(dataclasses.replace(config, d_model=16), config)
