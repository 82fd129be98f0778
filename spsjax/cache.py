"""Key-value caches. `lengths` is the only truth: what lies beyond it is stale, and masked."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.types import Array, pytree_dataclass


@pytree_dataclass
class KVCache:
    """Keys and values of each layer, with a length per row.

    Rolling back is `at(lengths)`: nothing is zeroed or copied. A pass over T tokens writes slots
    `lengths .. lengths + T`, so a buffer needs T slots of slack beyond the last valid one
    (`dynamic_update_slice` would silently move a write that does not fit).
    """

    keys: tuple[Array, ...]  # one [B, G, S, C] a layer
    values: tuple[Array, ...]  # one [B, G, S, C] a layer
    lengths: Array  # [B] int32, valid slots a row

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[2]

    def at(self, lengths: Array) -> "KVCache":
        """The same buffers with other lengths: a rollback, or an advance over written slots."""
        return KVCache(self.keys, self.values, lengths)


def empty(
    num_layers: int, batch: int, slots: int, num_kv_heads: int, head_dim: int, dtype
) -> KVCache:
    """A cache of `slots` slots with nothing in it."""
    shape = (batch, num_kv_heads, slots, head_dim)
    buffers = tuple(jnp.zeros(shape, dtype) for _ in range(2 * num_layers))
    return KVCache(buffers[:num_layers], buffers[num_layers:], jnp.zeros(batch, jnp.int32))


def write(buffer_BGSC: Array, update_BGTC: Array, starts_B: Array) -> Array:
    """Writes T entries of each row at the row's own start."""
    write_row = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write_row)(buffer_BGSC, update_BGTC, starts_B)


def causal_mask(positions_BT: Array, slots: int) -> Array:
    """[B, T, S] bool: a query sees the slots up to its own position, its own included.

    Slots and positions coincide for a chain, so this also hides every stale slot.
    """
    return jnp.arange(slots) <= positions_BT[:, :, None]
