"""Weights of an engine that are replaced while requests run."""

import collections
import gc
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.g_test import SUSPICIOUS, g_test
from helpers.models import build_model, nearby_model, spread_model

import spsjax
from spsjax import InputError, SamplingParams
from spsjax.models import transformer
from spsjax.runtime import pool as pool_module
from spsjax.runtime import weights
from spsjax.utils import compilation

GREEDY, K, ROWS = SamplingParams(temperature=0), 2, 16


@pytest.fixture(scope="module")
def models():
    """Two targets of 4 tokens, and a draft."""
    target = spread_model(4, sharpness=1.0)
    return target, spread_model(4, seed=5, sharpness=1.0), nearby_model(target)


@pytest.fixture(scope="module")
def engine(models):
    target, _, draft = models
    with mock.patch.object(pool_module, "row_sizes", lambda most, least: [most]):
        return spsjax.Engine(target, draft, K, rows=ROWS, slots=32, rounds=1, logprobs=0)


def laws(model, texts) -> dict:
    """Returns the probabilities of the token after each text, of at most 8 tokens."""
    padded = np.array([(*text, *[0] * (8 - len(text))) for text in texts])
    logits = np.asarray(transformer.apply(model.config, model.params, padded).logits, np.float64)
    last = logits[np.arange(len(padded)), [len(text) - 1 for text in texts]]
    weights = np.exp(last)
    return dict(zip(texts, weights / weights.sum(axis=-1, keepdims=True)))


def test_tokens_after_a_swap_follow_the_new_target(engine, models):
    """Given the text before it, as the texts' caches are those of the new weights."""
    old, new, _ = models
    counts, known, compiled_at = collections.Counter(), [], []
    for wave in range(40):
        engine.set_weights(old.params)
        requests = [
            engine.submit([1, row % 4], max_new_tokens=6, seed=ROWS * wave + row)
            for row in range(ROWS)
        ]
        while not any(request.tokens for request in requests):
            engine.step()
        before = [tuple(request.prompt + request.tokens) for request in requests]
        engine.set_weights(new.params)
        for text, request in zip(before, requests):
            tokens = (*request.prompt, *request.result())
            assert tokens[: len(text)] == text and len(request.logprobs.raw) == 6
            if len(tokens) > len(text):
                counts[text, tokens[len(text)]] += 1
                known.append((text, tokens[len(text)], request.logprobs.raw[len(text) - 2]))
        compiled_at.append(compilation._newest.ended)
    assert compiled_at[0] == compiled_at[-1]

    texts = collections.Counter(text for text, *_ in known)

    def expected(model):
        return {
            (text, token): texts[text] / texts.total() * mass
            for text, masses in laws(model, [*texts]).items()
            for token, mass in enumerate(masses)
        }

    law = laws(new, [*texts])
    for text, token, logprob in known:
        np.testing.assert_allclose(logprob, np.log(law[text][token]), atol=1e-4)
    assert g_test(counts, expected(new)) > SUSPICIOUS
    assert g_test(counts, expected(old)) < SUSPICIOUS  # which this many samples tell apart


def test_same_weights_change_nothing(engine, models):
    """Neither tokens nor counts; a new drafter changes no greedy token either."""
    target, other, draft = models
    engine.set_weights(target.params, draft.params)
    for sampling, drafters in ((SamplingParams(), [None, draft]), (GREEDY, [other, draft])):
        whole = engine.submit([1, 2], sampling, 20)
        whole.result()
        swapped = engine.submit([1, 2], sampling, 20)
        for drafter in drafters:
            engine.step()
            weights = None if drafter is None else drafter.params
            engine.set_weights(None if sampling is GREEDY else target.params, weights)
        assert swapped.result() == whole.tokens
        assert sum(swapped.accepted_histogram) == swapped.rounds
        if sampling is not GREEDY:
            assert swapped.rounds == whole.rounds


def test_weights_that_are_set_meanwhile_stay(engine, models):
    """As another thread may set the drafter's while the target's are copied."""
    target, other, draft = models
    like, calls = weights.like, []

    def slow(name, *args):
        if not calls:
            calls.append(name)
            engine.set_weights(drafter=other.params)
        return like(name, *args)

    with mock.patch.object(weights, "like", slow):
        engine.set_weights(other.params)
    for params in (engine.model.params, engine.drafter.params):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, other.params)))
    engine.set_weights(target.params, draft.params)


def test_error_while_texts_are_read_again_ends_them(engine, models):
    """Otherwise they would go on with caches of the old weights."""
    requests = [engine.submit([1, row], GREEDY, 20) for row in range(3)]
    while engine.num_running < 3:
        engine.step()
    fails = mock.patch.object(engine._pool, "insert", lambda *_: 1 / 0)
    with fails, pytest.raises(ZeroDivisionError):
        engine.set_weights(models[1].params)
    for request in requests:
        with pytest.raises(ZeroDivisionError):
            request.result()
    engine.set_weights(models[0].params)
    assert len(engine.submit([1, 2], GREEDY, 5).result()) == 5


def test_first_weights_are_not_kept(models):
    target, _, draft = (
        build_model(one.config, jax.tree.map(jnp.copy, one.params), None) for one in models
    )
    engine = spsjax.Engine(target, draft, K, rows=1, slots=32)
    kept = [weakref.ref(jax.tree.leaves(one.params)[0]) for one in (target, draft)]
    engine.set_weights(models[1].params, models[2].params)
    del target, draft
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_weights_that_do_not_fit_are_refused(engine, models):
    params = models[0].params
    wrong = jax.tree.map(lambda leaf: leaf, params)
    wrong["norm"] = {"scale": np.ones(3)}
    with pytest.raises(
        InputError, match=r"^target: norm/scale: expected the shape \[32\], found \[3\]"
    ):
        engine.set_weights(wrong)
    del wrong["norm"]
    with pytest.raises(InputError, match=r"^target: expected one, .* at norm/scale, found no"):
        engine.set_weights(wrong)
    with pytest.raises(InputError, match=r"^target: expected weights by name, .* found Model"):
        engine.set_weights(models[0])
    gone = jax.tree.map(jnp.copy, params)
    gone["norm"]["scale"].delete()
    with pytest.raises(InputError, match=r"^target: norm/scale: expected an array, found a del"):
        engine.set_weights(gone)
    gone["norm"] = {"scale": np.ones(32, np.complex64)}
    with pytest.raises(InputError, match=r"^target: norm/scale: expected numbers of a floating"):
        engine.set_weights(gone)
    with pytest.raises(InputError, match=r"^drafter: expected none at more, found one"):
        engine.set_weights(drafter=params | {"more": np.ones(3)})
