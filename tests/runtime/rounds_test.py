import numpy as np
import pytest

from spsjax.runtime import rounds
from spsjax.runtime.rounds import BONUS, DRAFT, RESIDUAL, Round


class Letters:
    vocab_size = 128

    def decode(self, ids):
        return "".join(chr(index) for index in ids)


def a_round(text, accepted, proposed, longest=None):
    tokens = np.array([ord(letter) for letter in text])
    return Round(tokens, accepted, proposed, longest or proposed)


def test_pieces_separate_kinds_of_tokens():
    steps = [
        a_round("abR", 2, 3),  # rejected after two
        a_round("cdeB", 3, 3),  # all accepted
        a_round("B", 0, 0),  # nothing proposed
        a_round("fgB", 2, 6, 2),  # the whole depth of a tree
        a_round("h", 3, 3),  # cut off inside the drafts
    ]
    assert list(rounds.pieces(Letters(), [ord(">")], steps)) == [
        ("ab", DRAFT), ("R", RESIDUAL), ("cde", DRAFT), ("B", BONUS), ("B", BONUS),
        ("fg", DRAFT), ("B", BONUS), ("h", DRAFT)
    ]  # fmt: skip


def test_totals_add_up_the_rounds():
    totals = rounds.Totals()
    steps = [a_round("abR", 2, 3), a_round("cdeB", 3, 3)]
    assert list(totals.count(steps)) == steps
    assert (totals.tokens, totals.rounds, totals.accepted, totals.proposed) == (7, 2, 5, 6)
    assert "7 tokens in 2 target calls, 3.50 tokens per call; 83% of draft tokens" in str(totals)
    assert str(rounds.Totals()).startswith("0 tokens in 0 target calls (excluding")
    assert totals.seconds == pytest.approx(0, abs=1)
