"""Lenience in greedy rows, by hand. In sampled rows `whole_texts_test` enumerates it."""

import jax
import numpy as np
import pytest

from spsjax import SamplingParams, sampling
from spsjax.types import Proposal
from spsjax.verifiers import rejection

LENIENCE = 0.5
# The first is the best. The second has exactly LENIENCE times its probability, the third less.
LOGITS = np.asarray([0, np.log(np.float32(LENIENCE)), np.log(0.3), -9], np.float32)
GREEDY = SamplingParams(temperature=0.0).rows(1)
to_probs = jax.jit(sampling.to_probs)


@jax.jit
def relaxed(probs, logits, token):
    """Returns the distributions [1, 2, 4] of a greedy row with one draft token."""
    drafted = token[None, None]
    return rejection.relax_greedy(probs, logits, drafted, np.ones(1, bool), LENIENCE)


@pytest.mark.parametrize(("token", "accepted"), [(0, True), (1, True), (2, False), (3, False)])
def test_greedy_lenience_accepts_at_least_its_share_of_the_best(token, accepted):
    """The draft token gets probability 1 from its share on, and all other tokens keep theirs."""
    logits = np.tile(LOGITS, (1, 2, 1))
    greedy = np.tile(np.eye(4, dtype=np.float32)[0], (1, 2, 1))
    actual = np.asarray(relaxed(greedy, logits, np.int32(token)))
    expected = np.asarray([1.0, 0, 0, 0])
    expected[token] = max(expected[token], accepted)
    np.testing.assert_array_equal(actual[0, 0], expected)
    np.testing.assert_array_equal(actual[0, 1], [1, 0, 0, 0])  # the bonus token has no draft


@pytest.mark.parametrize("bad", (np.inf, -np.inf, np.nan))
def test_greedy_lenience_keeps_a_distribution_that_is_not_finite(bad):
    """A token that would be accepted does not hide a NaN, whichever token has it."""
    for token in (1, 3):
        logits = np.tile(LOGITS, (1, 2, 1))
        logits[0, 0, token] = bad
        actual = np.asarray(relaxed(to_probs(logits, GREEDY), logits, np.int32(1)))
        assert np.isnan(actual[0, 0]).all()


@jax.jit
def verified(tokens, logits, params):
    """Returns the verdict on point masses, and the numbers of the tests of acceptance."""
    keys = sampling.row_keys(jax.random.key(0), len(tokens))
    verdict = rejection.Verifier(LENIENCE)(keys, Proposal(tokens, None), logits, params)
    return verdict, sampling.uniforms(keys, sampling.ACCEPT, 1)


def test_sampled_rows_keep_their_distribution_under_lenience():
    """In a mixed batch, sampled rows accept with the lenient ratio and greedy rows by their own.

    The draft token has 0.3 times the best one's probability: greedy rows refuse it, and sampled
    rows accept it with probability target / lenience. One with 0.6 times is accepted when greedy.
    """
    rows = 128
    logits = np.tile(np.log([0.5, 0.3, 0.15, 0.05]).astype(np.float32), (rows, 2, 1))
    temperature = np.arange(rows) % 2
    tokens = np.where(np.arange(rows) % 4 < 2, 1, 2)[:, None]
    params = SamplingParams(temperature=temperature.tolist()).rows(rows)
    verdict, uniform = jax.device_get(verified(tokens, logits, params))
    accepted, uniform = verdict.num_tokens == 2, uniform[:, 0]
    share = np.asarray([0.5, 0.3, 0.15, 0.05])[tokens[:, 0]]
    expected = np.where(temperature > 0, uniform * LENIENCE < share, tokens[:, 0] == 1)
    np.testing.assert_array_equal(accepted, expected)
    sampled = accepted[temperature > 0]
    assert 0 < sampled.sum() < len(sampled)
