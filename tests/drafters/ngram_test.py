"""Proposals of prompt lookup, compared with a plain loop."""

import jax
import numpy as np
import pytest
from helpers import drafting, reference

from spsjax.drafters import ngram


@pytest.mark.parametrize(("K", "sizes"), [(4, (1, 3)), (7, (2, 3)), (3, (1, 1))])
def test_ngram_proposal_is_that_of_a_plain_loop(K, sizes):
    """The longest, then latest earlier occurrence is copied, and repeated with its period.

    What lies beyond a row's tokens is never copied.
    """
    drafter = ngram.Drafter(K, min_ngram=sizes[0], max_ngram=sizes[1])
    rng = np.random.default_rng(K)
    tokens, lengths = rng.integers(0, 4, (400, 16)), rng.integers(1, 17, 400)

    @jax.jit
    def propose(tokens, lengths):
        return drafter.propose(None, (), drafting.round_of(tokens, lengths)).tokens

    proposed = np.asarray(propose(tokens, lengths)).tolist()
    expected = [
        reference.lookup(row[:length].tolist(), K, *sizes) for row, length in zip(tokens, lengths)
    ]
    assert proposed == expected
    missing = sum(row[0] < 0 for row in expected)
    assert 40 < missing < 360  # some rows match, some do not
