"""Lookahead decoding: its window and pool against a plain loop, its mask, merged n-grams."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import padded

from spsjax import InputError, SamplingParams, decode, sampling, tree
from spsjax.drafters.contrib import lookahead
from spsjax.models import transformer
from spsjax.types import Proposal
from spsjax.utils.compilation import compiled
from spsjax.verifiers import recursive

K, W, G, POOL = 2, 3, 2, 64
PROMPT = [3, 4, 5, 3, 4, 5, 3, 9, 3, 4]
GREEDY = SamplingParams(temperature=0.0)


def after_prompt(target, drafter):
    """Returns program, parameters and the state after the prompt."""
    program = decode.Program(target.config, drafter, recursive.Verifier())
    params = {"target": target.params, "drafter": {}}
    keys = sampling.row_keys(jax.random.key(2), 1)
    inputs = GREEDY.rows(1), *padded([PROMPT], 10), np.asarray([60], np.int32), keys
    return program, params, compiled(decode.prompt.prefill, program, 96)(params, *inputs)[0]


@functools.partial(jax.jit, static_argnums=0)
def best_after(config, params, texts, last):
    """Returns the target's most probable token after index `last` of each text."""
    logits = transformer.apply(config, params, texts).logits
    return jnp.argmax(logits[jnp.arange(len(texts)), last], axis=-1)


def paths(proposal, first):
    """Returns the token paths of a proposal's guesses, each once."""
    return {path for path in drafting.paths(proposal)[first + 1 :] if -1 not in path}


@pytest.mark.parametrize(
    "options",
    [
        (K, W, G, POOL, False),
        (K, W, G, POOL, True),
        pytest.param((1, 1, 1, 8, False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_window_and_pool_are_those_of_a_plain_loop(target, options):
    """The window is computed by passes over whole texts, one per token."""
    (K, W, G, size, follow), drafter = options, lookahead.Drafter(*options)
    program, params, state = after_prompt(target, drafter)

    def after(*texts):
        """Returns the target's most probable token after each text."""
        padded, last = np.zeros((W + 1, 96), np.int32), np.zeros(W + 1, int)
        for row, text in enumerate(texts):
            padded[row, : len(text)], last[row] = text, len(text) - 1
        return np.asarray(best_after(target.config, target.params, padded, last)).tolist()

    run = compiled(drafting.small_step, program)
    window, ngrams, proposed = np.asarray(state.drafter.window)[0].tolist(), [], 0
    prompt = np.asarray(PROMPT)
    for column in range(W):  # it begins with n-grams of the prompt
        wanted = [row[column] for row in window]
        assert any((prompt[i : i + K] == wanted).all() for i in range(len(PROMPT) - K + 1))
    for _ in range(12):
        length = int(state.lengths[0])
        text = np.asarray(state.tokens)[0, :length].tolist()
        (proposal, state), _ = run(params, state)
        pool = dict.fromkeys(reversed(ngrams[-size:]))  # the newest first, each once
        guessed = [value for key, value in pool if key == text[-1]][:G]
        expected = {value[:depth] for value in guessed for depth in range(1, K + 1)}
        assert paths(proposal, K * W - 1) == expected
        proposed += len(expected)
        guesses = [text + window[0][1 : i + 1] + [row[i] for row in window[1:]] for i in range(W)]
        *newest, following = after(*guesses, text)
        assert int(state.tokens[0, length]) == following
        for i in range(W):
            key = window[0][i] if i else text[-1]
            ngrams.append((key, (*(row[i] for row in window[1:]), newest[i])))
        window = [*window[1:], newest]
        got = np.asarray(state.drafter.window)[0]
        more = int(state.lengths[0]) - length - 1
        if follow and more:
            kept = max(W - more, 0)
            np.testing.assert_array_equal(got[:, :kept], np.asarray(window)[:, more:])
            assert np.isin(got[:, kept:], PROMPT).all()
            window = got.tolist()
        np.testing.assert_array_equal(got, window)
    assert proposed > (5 if K > 1 else 0)


def test_window_is_a_tree_whose_depths_are_positions():
    """Row r of column i is r + i deep, below its own column and the columns before it in row 0."""
    drafter = lookahead.Drafter(3, 4, 1, 64)
    parents = jnp.asarray(drafter._window_parents)[None]
    depths = np.asarray(tree.depths(parents))[0].reshape(3, 4)
    np.testing.assert_array_equal(depths, np.add.outer(np.arange(3), np.arange(4)))
    above = np.asarray(tree.ancestors(parents))[0]
    assert np.flatnonzero(above[2 * 4 + 2]).tolist() == [0, 1, 2, 6, 10]


def test_ngrams_that_begin_alike_are_merged():
    """Of five n-grams after token 1, two are equal and two share their first token."""
    drafter = lookahead.Drafter(2, 1, 5, 8)
    state = drafter.init(None, 1, 32)
    values = [[2, 3], [4, 5], [2, 6], [2, 3], [9, 9]]
    state = dataclasses.replace(
        state,
        keys=jnp.asarray([[1, 1, 1, 1, 7, -1, -1, -1]]),
        values=state.values.at[0, :5].set(jnp.asarray(values)),
        next=jnp.asarray([5]),
    )
    now = drafting.round_of(jnp.asarray([[8, 1, 0]]), jnp.asarray([2]))
    proposal = jax.jit(drafter.propose)(None, state, now)
    tokens = np.asarray(proposal.tokens)[0, 1:].reshape(5, 2).tolist()
    # Newest first: 2 3, 2 6, 4 5, 2 3; the fifth place is empty.
    assert tokens == [[2, 3], [-1, 6], [4, 5], [-1, -1], [-1, -1]]
    parents = np.asarray(proposal.parents)[0, 1:].reshape(5, 2).tolist()
    assert parents[:3] == [[0, 2], [0, 2], [0, 6]]
    assert isinstance(proposal, Proposal) and proposal.eligible[0].tolist() == [False] + [True] * 10


def test_ngram_that_comes_again_is_the_newest():
    state = lookahead.Drafter(1, 2, 2, 4).init(None, 1, 32)
    row, remember = jax.tree.map(lambda leaf: leaf[0], state), jax.jit(lookahead._add_to_pool)
    for keys, values in (([1, 2], [[5], [6]]), ([1, 3], [[5], [7]]), ([4, 4], [[8], [8]])):
        row = remember(row, np.asarray(keys, np.int32), np.asarray(values, np.int32))
    assert row.keys.tolist() == [-1, 4, 1, 3] and row.next == 2
    assert row.values[1:, 0].tolist() == [8, 5, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected an integer >= 0"),
        ({"window": 0}, "window: expected an integer >= 1, found 0"),
        ({"num_guesses": 0}, "num_guesses: expected an integer >= 1, found 0"),
        ({"pool": 14}, "pool: expected an integer >= 15, found 14"),
        ({"follow": 1}, "follow: expected"),
    ],
)
def test_odd_options_are_refused(options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        lookahead.Drafter(**options)
