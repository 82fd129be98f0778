"""Pairs that a layer has not read yet, because nothing was drafted since."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.types import Array, PyTree, pytree_dataclass

_ROOM = 256  # pairs that can wait
_MANY = 64  # pairs that are read at once after a long wait, which costs far less than one by one


@pytree_dataclass
class Waiting:
    """The last pairs of a feature and the token that follows it, read or not."""

    features: Array  # [B, W, D], or what they are made of; that of pair t is in slot t modulo W
    pairs: Array  # [B] int32, pairs of committed tokens


def empty(batch: int, num_speculative_tokens: int, width: int, dtype) -> Waiting:
    """Returns room for the features of enough pairs that they are rarely read."""
    slots = max(_ROOM, 4 * (num_speculative_tokens + 1))
    return Waiting(jnp.zeros((batch, slots, width), dtype), jnp.zeros(batch, jnp.int32))


def add(waiting: Waiting, features_BTD: Array, pairs_B: Array, read_B: Array) -> Waiting:
    """Returns the features with those that follow, of which the new number of pairs keeps some.

    `read_B` are the pairs that the layer has read, none of which is below 0.
    """
    slots = waiting.features.shape[1]
    # That it depends on what was read shows the compiler that the write comes after `read`, so that
    # it need not copy the features.
    start = waiting.pairs + jnp.minimum(read_B, 0)
    index = (start[:, None] + jnp.arange(features_BTD.shape[1])) % slots
    put = jax.vmap(lambda held, index, new: held.at[index].set(new.astype(held.dtype)))
    return Waiting(put(waiting.features, index, features_BTD), pairs_B)


def read(
    state: PyTree,
    tokens_BS: Array,
    chunk: int,
    soon: Array,
    extended: Callable[[PyTree, Array, Array, Array], PyTree],
) -> PyTree:
    """Returns a state after its layer has read what waits, if it drafts next or room runs out.

    Args:
        state: a state with `unread`, and with a `cache` of the pairs that were read.
        tokens_BS: token buffer.
        chunk: pairs that are read at once if few wait, at least as many as a round can add.
        soon: [] bool, whether all are read.
        extended: takes a state, tokens and features of the pairs that follow, and the new number of
            pairs; returns the state after them.
    """
    if state.unread is None:  # every pair was read when its round ended
        return state
    slots, buffer = state.unread.features.shape[1], state.cache.num_slots
    many = min(_MANY, buffer // 2)

    def advance(state, count):
        index = state.cache.lengths[:, None] + jnp.arange(count)
        tokens = tree.along(jnp.minimum(index + 1, tokens_BS.shape[1] - 1), tokens_BS)
        features = tree.along(index % slots, state.unread.features)
        ends = jnp.minimum(state.cache.lengths + count, state.unread.pairs)
        return extended(state, tokens, features, ends)

    def wait(state, kept):
        waiting = state.unread.pairs - state.cache.lengths
        return jnp.any(waiting > jnp.where(soon, kept, slots - 2 * chunk))

    if many > 2 * chunk:
        # Those that are read beyond the waiting ones must not exceed the cache either.
        state = lax.while_loop(
            lambda state: wait(state, 2 * chunk) & jnp.all(state.cache.lengths + many <= buffer),
            lambda state: advance(state, many),
            state,
        )
    return lax.while_loop(lambda state: wait(state, 0), lambda state: advance(state, chunk), state)
