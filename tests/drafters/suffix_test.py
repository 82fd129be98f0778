"""Proposals of look-ups, compared with plain loops and with counting by brute force."""

import numpy as np
import pytest
from helpers import drafting, reference

from spsjax import InputError
from spsjax.drafters import ngram, suffix
from spsjax.utils.compilation import compiled

ROWS, SLOTS = 300, 20
DEFAULTS = {"max_match": 5, "factor": 1.0, "min_prob": 0.13}


def propose(drafter, tokens, lengths):
    proposal = drafter.propose({"drafter": {}}, (), drafting.round_of(tokens, lengths))
    return proposal.tokens, proposal.parents


def paths_of(tokens, parents):
    """Returns the paths of the nodes that hold a token, in order."""
    paths = [()]
    for token, parent in zip(tokens, parents):
        if token >= 0:
            paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize(("K", "sizes"), [(4, (1, 3)), (7, (2, 3)), (3, (1, 1))])
def test_ngram_proposal_is_that_of_a_plain_loop(K, sizes):
    """Repeated with its period; what lies beyond a row's tokens is never copied."""
    drafter = ngram.Drafter(K, min_ngram=sizes[0], max_ngram=sizes[1])
    rng = np.random.default_rng(K)
    tokens, lengths = rng.integers(0, 4, (400, 16)), rng.integers(1, 17, 400)
    (proposed, _), _ = compiled(propose, drafter)(tokens, lengths)
    texts = (row[:length].tolist() for row, length in zip(tokens, lengths))
    expected = [reference.lookup(text, K, *sizes) for text in texts]
    assert np.asarray(proposed).tolist() == expected
    missing = sum(row[0] < 0 for row in expected)
    assert 40 < missing < 360  # some rows match, some do not


@pytest.mark.parametrize(
    ("K", "N", "options"),
    [
        (4, 0, {}),
        (4, 0, {"factor": 0.5, "min_prob": 0.27}),
        (4, 0, {"factor": 1.5, "min_prob": 0.0}),
        (3, 6, {}),
        (3, 6, {"factor": 1.5, "min_prob": 0.0}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((3, 0, {"max_match": 2, "factor": 2.0, "min_prob": 0.0}), (4, 2, {}))
        ),
    ],
)
def test_proposal_has_the_highest_score_of_counts(K, N, options):
    """Of all lengths of the match, the one whose counts promise most tokens, is taken."""
    options = DEFAULTS | options
    drafter = suffix.Drafter(K, num_tree_tokens=N, **options)
    rng = np.random.default_rng(K + N)
    tokens, lengths = rng.integers(0, 3, (ROWS, SLOTS)), rng.integers(1, SLOTS + 1, ROWS)
    (proposed, parents), _ = compiled(propose, drafter)(tokens, lengths)
    missing = 0
    for row, length in enumerate(lengths):
        text = tokens[row, :length].tolist()
        expected = reference.suffix_proposals(text, K, N, **options)
        above = np.asarray(parents)[row] if N else np.arange(K)
        actual = paths_of(np.asarray(proposed)[row].tolist(), above.tolist())
        if not expected:
            assert actual == []
            missing += 1
            continue
        score = [sum(prob for _, prob in nodes) for nodes in expected]
        best = [path for path, _ in expected[score.index(max(score))]]
        assert (actual if not N else sorted(actual)) == (best if not N else sorted(best)), text
    assert 10 < missing < 150


def test_text_behind_the_last_token_is_not_read():
    """Two tokens match, and so two are proposed, whatever stale tokens follow."""
    tokens = np.zeros((ROWS, SLOTS), int)
    tokens[:, :6] = 5, 6, 7, 8, 5, 6
    tokens[1, 6:], tokens[2, 6:] = 5, 6
    drafter = suffix.Drafter(4, **DEFAULTS)
    (proposed, _), _ = compiled(propose, drafter)(tokens, np.full(ROWS, 6))
    np.testing.assert_array_equal(proposed[:3], [[7, 8, -1, -1]] * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected an integer >= 0"),
        ({"num_tree_tokens": -3}, "num_tree_tokens: expected an integer >= 0, found -3"),
        ({"max_match": 0}, "max_match: expected an integer from 1 to 65536, found 0"),
        ({"factor": -1.0}, "factor: expected a finite number"),
        ({"min_prob": 2.0}, "min_prob: expected a finite number"),
    ],
)
def test_odd_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        suffix.Drafter(**options)
