"""Pending features: a buffer of features that a drafter's layer has not read yet.

`commit` stores the features of accepted tokens, and `sync` reads them before the next draft. So a
round that skips drafting does not run the layer.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from spsjax import tree
from spsjax.types import Array, PyTree, Round, pytree_dataclass

_SLOTS = 256  # pairs in the buffer
_LONG_CHUNK = 64  # pairs per pass after many rounds without a draft; far cheaper than short passes


@pytree_dataclass
class Pending:
    """Ring buffer of the last features, read or unread.

    Pair t is feature t and token t + 1. The token buffer has the tokens.
    """

    features: Array  # [B, W, D] features or raw features; feature t is in slot t modulo W
    pairs: Array  # [B] int32, number of pairs of committed tokens


def empty(batch: int, num_speculative_tokens: int, width: int, dtype: DTypeLike) -> Pending:
    """Returns an empty buffer for pending features."""
    slots = max(_SLOTS, 4 * (num_speculative_tokens + 1))
    return Pending(jnp.zeros((batch, slots, width), dtype), jnp.zeros(batch, jnp.int32))


def add(pending: Pending, features_BTD: Array, pairs_B: Array, read_B: Array) -> Pending:
    """Returns the buffer with the next T features, of which `pairs_B` counts the valid ones.

    `read_B` is the number of pairs that the layer has read, which is never negative.
    """
    slots = pending.features.shape[1]
    # Adds 0. The dependence on `read_B` tells the compiler that this write follows every read of
    # the buffer in `read`; else it copies the buffer.
    start = pending.pairs + jnp.minimum(read_B, 0)
    index = (start[:, None] + jnp.arange(features_BTD.shape[1])) % slots
    put = jax.vmap(lambda old, index, new: old.at[index].set(new.astype(old.dtype)))
    return Pending(put(pending.features, index, features_BTD), pairs_B)


def read(
    state: PyTree,
    now: Round,
    chunk: int,
    extend: Callable[[PyTree, Array, Array, Array], PyTree],
) -> PyTree:
    """Returns a state after its layer has read the pending features.

    In a round without a draft they stay pending, unless the buffer is nearly full.

    Args:
        state: state with `pending`, and with a `cache` of the pairs that were read.
        now: the round that begins.
        chunk: pairs per pass if few are pending, the most that one round can add.
        extend: function of a state, tokens and features of the next pairs, and the new number of
            pairs; returns the state after the layer has read them.
    """
    slots, buffer = state.pending.features.shape[1], state.cache.num_slots

    def advance(state: PyTree, count: int) -> PyTree:
        index = state.cache.lengths[:, None] + jnp.arange(count)
        tokens = tree.along(jnp.minimum(index + 1, now.tokens.shape[1] - 1), now.tokens)
        features = tree.along(index % slots, state.pending.features)
        ends = jnp.minimum(state.cache.lengths + count, state.pending.pairs)
        return extend(state, tokens, features, ends)

    if now.depths is None:  # every round drafts, so at most one round's pairs are pending
        return advance(state, chunk)
    drafts_now = jnp.any(now.depths > 0)
    long_chunk = min(_LONG_CHUNK, buffer // 2)

    def exceeds(state: PyTree, most: int | Array) -> Array:
        """Returns whether a row has more than `most` pending pairs, or nearly a full buffer."""
        count = state.pending.pairs - state.cache.lengths
        return jnp.any(count > jnp.where(drafts_now, most, slots - 2 * chunk))

    if long_chunk > 2 * chunk:
        # A long pass also writes rows beyond the pending pairs, and they must fit into the cache.
        state = lax.while_loop(
            lambda state: (
                exceeds(state, 2 * chunk) & jnp.all(state.cache.lengths + long_chunk <= buffer)
            ),
            lambda state: advance(state, long_chunk),
            state,
        )
    return lax.while_loop(
        lambda state: exceeds(state, 0), lambda state: advance(state, chunk), state
    )
