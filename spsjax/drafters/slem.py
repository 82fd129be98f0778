"""String-level exact match: drafts of text, which is cut into the target's tokens.

Timor et al. 2025 (arXiv 2502.05202), Algorithm 2, on the device. Departures: the draft is greedy,
because a proposed token counts as a point mass, which is accepted most often where it is the most
probable one. The text is cut by longest matches, and not by the target's tokenizer.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax.drafters import foreign, foreign_tables
from spsjax.drafters.choices import Choices
from spsjax.drafters.foreign_tables import Pair
from spsjax.errors import InputError
from spsjax.types import Array, Proposal, PyTree, Round
from spsjax.utils.fields import integer

_CODES, _HASHES, _CHECKS, _SIZES, _IDS = "codes", "hashes", "checks", "sizes", "ids"  # tables


@dataclasses.dataclass(frozen=True)
class Drafter(foreign.ForeignDrafter):
    """Proposes the text of a draft model with another tokenizer, in the target's tokens. Lossless.

    The draft's most probable tokens are K strings of bytes. They are cut into target tokens, of
    which each is the longest that the rest begins with. A proposed token is a point mass. The text
    ends at a token of the draft without a string, and where no token of the target matches.

    Tables: "codes" are the bytes of each draft token [V of the draft, M] int16, then -1. Strings of
    the target are stored by two hashes, "hashes" in ascending order and "checks" [N] uint32, with
    their "sizes" in bytes and their "ids" [N] int32. The code 256 is the end of a sequence.

    Attributes:
        num_strings: N, number of strings of the target.
        most_codes: M, bytes of the longest draft token.
        most_bytes: bytes of the longest string of the target.
    """

    num_strings: int = integer(1, 1)
    most_codes: int = integer(1, 1)
    most_bytes: int = integer(1, 1, foreign_tables.MOST_BYTES)

    def table_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        of_strings = {_HASHES: jnp.uint32, _CHECKS: jnp.uint32, _SIZES: jnp.int32, _IDS: jnp.int32}
        tables = {
            name: jax.ShapeDtypeStruct((self.num_strings,), dtype)
            for name, dtype in of_strings.items()
        }
        codes = jax.ShapeDtypeStruct((self.config.vocab_size, self.most_codes), jnp.int16)
        return {_CODES: codes, **tables}

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        # A temperature of 0, whatever that of the row is.
        rows = dataclasses.replace(now.rows, temperature=jnp.zeros_like(now.rows.temperature))
        greedy = dataclasses.replace(now, rows=rows, estimates=False)
        drafted = self.grow(params, state, greedy, Choices.of, lambda tokens: tokens)
        return Proposal(self.cut(params["drafter"][foreign.TABLES], drafted.tokens), None)

    def cut(self, tables: PyTree, drafted_BK: Array) -> Array:
        """Returns tokens of the target [B, K] int32 for the text of draft tokens; -1: no token."""
        B, K = drafted_BK.shape
        pieces_BKM = tables[_CODES][jnp.maximum(drafted_BK, 0)]
        counts = jnp.sum(pieces_BKM >= 0, axis=2, dtype=jnp.int32)
        known = jnp.cumprod((drafted_BK >= 0) & (counts > 0), axis=1, dtype=jnp.int32)
        text = jnp.full((B, K * self.most_codes + self.most_bytes), -1, jnp.int16)
        nothing = jnp.zeros(B, jnp.int32)
        text = foreign.concatenated(text, nothing, pieces_BKM, known * counts)[0]

        def match(start: Array, _: None) -> tuple[Array, Array]:
            token, size = self._longest_match(tables, text, start)
            return start + size, token

        tokens = lax.scan(match, nothing, length=K)[1]
        return jnp.moveaxis(tokens, 0, 1)

    def _longest_match(self, tables: PyTree, text_BS: Array, start_B: Array) -> tuple[Array, Array]:
        """Returns the longest token that a text begins with at `start_B`, and its size: [B] each.

        They are -1 and 0 if there is none. Behind the text are codes of -1, which no string has.
        """
        size = jnp.arange(1, self.most_bytes + 1)
        window = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, self.most_bytes))
        hashes, checks = (
            jnp.cumsum(summands, axis=1, dtype=jnp.uint32)
            for summands in _summands(window(text_BS, start_B).astype(jnp.uint32))
        )
        index = jnp.searchsorted(tables[_HASHES], hashes)
        index = jnp.minimum(index, self.num_strings - 1)
        matches = (tables[_CHECKS][index] == checks) & (tables[_SIZES][index] == size)
        best = jnp.max(jnp.where(matches, size, 0), axis=1)
        at = jnp.take_along_axis(index, jnp.maximum(best - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(best > 0, tables[_IDS][at], -1), best.astype(jnp.int32)


@functools.cache
def _factors() -> np.ndarray:
    """Returns two odd factors per byte of a string [2, MOST_BYTES] uint32."""
    numbers = np.random.default_rng(0).integers(0, 2**31, (2, foreign_tables.MOST_BYTES))
    return (2 * numbers + 1).astype(np.uint32)


def _summands(codes: Any) -> tuple[Any, Any]:
    """Returns what each code adds to two hashes of its string, modulo 2**32."""
    first, second = _factors()[:, : codes.shape[1]]
    return (codes + 1) * first, (codes + 1) * second


def from_pair(pair: Pair) -> tuple[Drafter, dict[str, Any]]:
    """Returns the drafter of a pair and its tables; raises InputError if it has no strings."""
    codes, (strings, ids) = foreign_tables.token_codes(pair), foreign_tables.target_strings(pair)
    if not len(ids) or not (codes >= 0).any():
        raise InputError('vocabulary: expected tokens with a text, for "slem", found none')
    present, raw = strings >= 0, strings.astype(np.uint32)
    sizes = np.asarray(np.sum(present, axis=1), np.int32)
    sums = [
        np.asarray(np.sum(np.where(present, summands, 0), axis=1, dtype=np.uint32))
        for summands in _summands(raw)
    ]
    # Of two strings with one hash, the shorter is kept. The other one is never proposed.
    hashes, kept = np.unique(sums[0], return_index=True)
    tables = {
        foreign.TO_DRAFT: pair.to_draft,
        _CODES: codes,
        _HASHES: hashes,
        _CHECKS: sums[1][kept],
        _SIZES: sizes[kept],
        _IDS: ids[kept],
    }
    widths = {"most_codes": codes.shape[1], "most_bytes": strings.shape[1]}
    longest, sizes_of = pair.to_draft.shape[1], (pair.config, pair.vocab_size)
    return Drafter(*sizes_of, longest, pair.begin, num_strings=len(kept), **widths), tables
