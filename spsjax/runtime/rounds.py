"""Rounds of one text, one after another: what they gave, how its tokens came about, and counts."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from spsjax.tokenization.base import incremental_text

DRAFT, RESIDUAL, BONUS = "draft", "residual", "bonus"


@dataclasses.dataclass(frozen=True)
class Round:
    """Result of one round for one row.

    Attributes:
        tokens: new tokens, cut off at an end of sequence or at the limit.
        accepted: draft tokens accepted, before the cut.
        proposed: draft tokens proposed.
        longest: most of them that could be accepted: all, or K, the depth of a tree.
    """

    tokens: np.ndarray
    accepted: int
    proposed: int
    longest: int


def pieces(tokenizer, prompt: Sequence[int], rounds: Iterable[Round]) -> Iterator[tuple[str, str]]:
    """Yields pieces of the text, each with the kind of its tokens.

    The kinds are `DRAFT`, accepted draft tokens; `RESIDUAL`, the target's token after a rejection;
    `BONUS`, its token after none. A character that spans tokens is held back until it is whole.
    """
    tokens, sent, kind = list[int](), 0, DRAFT
    for decoded in rounds:
        # An end of sequence or the budget may have cut the block off before its last token.
        drafted = min(decoded.accepted, len(decoded.tokens))
        last = BONUS if decoded.accepted == decoded.longest else RESIDUAL
        for kind, new in ((DRAFT, decoded.tokens[:drafted]), (last, decoded.tokens[drafted:])):
            tokens += new.tolist()
            text = incremental_text(tokenizer, prompt, tokens).rstrip("\ufffd")
            if len(text) > sent:
                yield text[sent:], kind
                sent = len(text)
    text = incremental_text(tokenizer, prompt, tokens)
    if len(text) > sent:
        yield text[sent:], kind


@dataclasses.dataclass
class Totals:
    """Counts and times of one text that was generated round by round.

    Attributes:
        tokens, rounds, accepted, proposed: totals over the rounds.
        seconds: time of the rounds.
        warm_up: seconds that compilation and a first round took.
    """

    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    proposed: int = 0
    seconds: float = 0.0
    warm_up: float = 0.0

    def count(self, rounds: Iterable[Round]) -> Iterator[Round]:
        """Yields the rounds, and adds up their counts and the time that each takes."""
        start = time.perf_counter()
        for decoded in rounds:
            self.seconds += time.perf_counter() - start
            self.tokens += len(decoded.tokens)
            self.rounds += 1
            self.accepted += decoded.accepted
            self.proposed += decoded.proposed
            yield decoded
            start = time.perf_counter()

    def __str__(self):
        line = f"{self.tokens} tokens in {self.rounds} target calls"
        if self.rounds:
            line += f", {self.tokens / self.rounds:.2f} tokens per call"
        if self.proposed:
            line += f"; {self.accepted / self.proposed:.0%} of draft tokens accepted"
        if self.tokens:
            line += f"; {1e3 * self.seconds / self.tokens:.2f} ms/token"
        return line + f" (excluding {self.warm_up:.1f} s for compilation and a first round)"
