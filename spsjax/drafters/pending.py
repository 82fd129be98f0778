"""Features that a layer has not read yet.

`commit` stores the features of accepted tokens, and `sync` reads them before the next draft.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.types import Array, PyTree, Round, pytree_dataclass

_ROOM = 256  # pairs that can wait
_MANY = 64  # pairs that are read at once after a long wait, which costs far less than one by one


@pytree_dataclass
class Pending:
    """The last pairs of a feature and the token that follows it, read or not."""

    features: Array  # [B, W, D], or what they are made of; that of pair t is in slot t modulo W
    pairs: Array  # [B] int32, pairs of committed tokens


def empty(batch: int, num_speculative_tokens: int, width: int, dtype) -> Pending:
    """Returns an empty buffer for pending features."""
    slots = max(_ROOM, 4 * (num_speculative_tokens + 1))
    return Pending(jnp.zeros((batch, slots, width), dtype), jnp.zeros(batch, jnp.int32))


def add(pending: Pending, features_BTD: Array, pairs_B: Array, read_B: Array) -> Pending:
    """Adds the features that follow, of which the new number of pairs keeps some.

    `read_B` are the pairs that the layer has read, none of which is below 0.
    """
    slots = pending.features.shape[1]
    # That it depends on what was read shows the compiler that the write comes after `read`, so that
    # it need not copy the features.
    start = pending.pairs + jnp.minimum(read_B, 0)
    index = (start[:, None] + jnp.arange(features_BTD.shape[1])) % slots
    put = jax.vmap(lambda old, index, new: old.at[index].set(new.astype(old.dtype)))
    return Pending(put(pending.features, index, features_BTD), pairs_B)


def read(
    state: PyTree,
    now: Round,
    chunk: int,
    extended: Callable[[PyTree, Array, Array, Array], PyTree],
) -> PyTree:
    """Returns a state after its layer has read what is pending.

    In a round without a draft that may wait, unless the buffer is nearly full.

    Args:
        state: a state with `pending`, and with a `cache` of the pairs that were read.
        now: the round that begins.
        chunk: pairs that are read at once if few are pending, as many as a round can add.
        extended: takes a state, tokens and features of the pairs that follow, and the new number of
            pairs; returns the state after them.
    """
    slots, buffer = state.pending.features.shape[1], state.cache.num_slots

    def advance(state, count):
        index = state.cache.lengths[:, None] + jnp.arange(count)
        tokens = tree.along(jnp.minimum(index + 1, now.tokens.shape[1] - 1), now.tokens)
        features = tree.along(index % slots, state.pending.features)
        ends = jnp.minimum(state.cache.lengths + count, state.pending.pairs)
        return extended(state, tokens, features, ends)

    if now.depths is None:  # every round drafts, so that the last one's pairs are all there is
        return advance(state, chunk)
    soon = jnp.any(now.depths > 0)
    many = min(_MANY, buffer // 2)

    def is_pending(state, kept):
        count = state.pending.pairs - state.cache.lengths
        return jnp.any(count > jnp.where(soon, kept, slots - 2 * chunk))

    if many > 2 * chunk:
        # Those that are read beyond the pending ones must not exceed the cache either.
        state = lax.while_loop(
            lambda state: (
                is_pending(state, 2 * chunk) & jnp.all(state.cache.lengths + many <= buffer)
            ),
            lambda state: advance(state, many),
            state,
        )
    return lax.while_loop(
        lambda state: is_pending(state, 0), lambda state: advance(state, chunk), state
    )
