"""Prompt lookup: the continuation of an earlier occurrence of the last tokens (Saxena 2023)."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from spsjax.drafters import base
from spsjax.errors import InputError, short_repr
from spsjax.types import Proposal, PyTree, Round


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Copies the tokens after the longest, then latest, earlier occurrence of the last tokens.

    Lossless: a copied token is a point mass. A row without a match proposes nothing.

    Attributes:
        num_speculative_tokens: K, number of copied tokens. If the match is less than K tokens back,
            the tokens between it and the end are repeated: the text is taken to be periodic.
        max_ngram: longest suffix that is looked up.
        min_ngram: shortest suffix that counts as a match.
    """

    num_speculative_tokens: int = 4
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        sizes = self.min_ngram, self.max_ngram
        if (
            not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in sizes)
            or not 1 <= sizes[0] <= sizes[1] <= 32
        ):
            raise InputError(
                "min_ngram, max_ngram: expected integers, 1 <= min_ngram <= max_ngram <= 32, "
                f"found {short_repr(self.min_ngram)}, {short_repr(self.max_ngram)}"
            )

    @property
    def score_sizes(self) -> tuple[int, ...]:
        return 0, self.num_speculative_tokens  # 0: no row has a match

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        tokens_BS, last = now.tokens, now.lengths[:, None] - 1
        slots = jnp.arange(tokens_BS.shape[1])
        # matched[b, i]: length of the common suffix of the row and its first i + 1 tokens.
        matched, run = jnp.zeros_like(tokens_BS), slots < last
        for back in range(self.max_ngram):
            suffix = jnp.take_along_axis(tokens_BS, jnp.maximum(last - back, 0), axis=1)
            run = run & (slots >= back) & (jnp.roll(tokens_BS, back, axis=1) == suffix)
            matched = matched + run
        match = jnp.argmax(matched * len(slots) + slots, axis=1)[:, None]  # longest, then latest
        long_enough = jnp.take_along_axis(matched, match, axis=1) >= self.min_ngram
        period = jnp.maximum(last - match, 1)
        source = match + 1 + jnp.arange(self.num_speculative_tokens) % period
        source = jnp.minimum(source, tokens_BS.shape[1] - 1)
        copied = jnp.take_along_axis(tokens_BS, source, axis=1)
        return Proposal(jnp.where(long_enough, copied, -1), None)


from_name = base.by_name_alone(Drafter)
