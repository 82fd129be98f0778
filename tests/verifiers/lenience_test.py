"""Lenience in greedy rows, by hand. In sampled rows `whole_texts_test` enumerates it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax import SamplingParams, sampling
from spsjax.types import Proposal
from spsjax.verifiers import rejection

LENIENCE = 0.5
# The first is the best. The second has exactly LENIENCE times its probability, the third less.
LOGITS = np.asarray([0, np.log(np.float32(LENIENCE)), np.log(0.3), -9], np.float32)


@pytest.mark.parametrize(("token", "accepted"), [(0, True), (1, True), (2, False), (3, False)])
def test_greedy_lenience_accepts_at_least_its_share_of_the_best(token, accepted):
    """The draft token gets probability 1 from its share on, and all other tokens keep theirs."""
    logits = jnp.tile(LOGITS, (1, 2, 1))
    greedy = jnp.tile(jax.nn.one_hot(0, 4), (1, 2, 1))
    drafted, rows = jnp.asarray([[token]]), jnp.ones(1, bool)
    relaxed = np.asarray(rejection.relax_greedy(greedy, logits, drafted, rows, LENIENCE))
    expected = np.asarray([1.0, 0, 0, 0])
    expected[token] = max(expected[token], accepted)
    np.testing.assert_array_equal(relaxed[0, 0], expected)
    np.testing.assert_array_equal(relaxed[0, 1], [1, 0, 0, 0])  # the bonus token has no draft


@pytest.mark.parametrize("bad", (np.inf, -np.inf, np.nan))
def test_greedy_lenience_keeps_a_distribution_that_is_not_finite(bad):
    """A token that would be accepted does not hide a NaN, whichever token has it."""
    for token in (1, 3):
        logits = jnp.tile(LOGITS, (1, 2, 1)).at[0, 0, token].set(bad)
        probs = sampling.to_probs(logits, SamplingParams(temperature=0.0).rows(1))
        drafted, rows = jnp.asarray([[1]]), jnp.ones(1, bool)
        relaxed = rejection.relax_greedy(probs, logits, drafted, rows, LENIENCE)
        assert np.isnan(relaxed[0, 0]).all()


def test_sampled_rows_keep_their_distribution_under_lenience():
    """In a mixed batch, sampled rows accept with the lenient ratio and greedy rows by their own.

    The draft token has 0.3 times the best one's probability: greedy rows refuse it, and sampled
    rows accept it with probability target / lenience. One with 0.6 times is accepted when greedy.
    """
    rows = 128
    logits = np.tile(np.log([0.5, 0.3, 0.15, 0.05]).astype(np.float32), (rows, 2, 1))
    temperature = np.arange(rows) % 2
    tokens = np.where(np.arange(rows) % 4 < 2, 1, 2)[:, None]
    keys = sampling.row_keys(jax.random.key(0), rows)
    params = SamplingParams(temperature=temperature.tolist()).rows(rows)
    verify = jax.jit(rejection.Verifier(LENIENCE))
    verdict = verify(keys, Proposal(jnp.asarray(tokens), None), logits, params)
    accepted = np.asarray(verdict.num_tokens) == 2
    uniform = np.asarray(sampling.uniforms(keys, sampling.ACCEPT, 1))[:, 0]
    share = np.asarray([0.5, 0.3, 0.15, 0.05])[tokens[:, 0]]
    expected = np.where(temperature > 0, uniform * LENIENCE < share, tokens[:, 0] == 1)
    np.testing.assert_array_equal(accepted, expected)
    sampled = accepted[temperature > 0]
    assert 0 < sampled.sum() < len(sampled)
