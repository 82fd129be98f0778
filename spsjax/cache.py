"""Key-value caches. `lengths` is the only truth: what lies beyond it is stale, and masked."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.types import Array, pytree_dataclass


@pytree_dataclass
class Layer:
    """One layer's part of a cache."""

    keys: Array  # [B, G, S, C]
    values: Array  # [B, G, S, C]
    lengths: Array  # [B] int32
    distances: Array | None  # [H, S, C]


@pytree_dataclass
class KVCache:
    """Keys and values of each layer, with a length per row.

    Rolling back is `at(lengths)`: nothing is zeroed or copied. A pass over T tokens writes slots
    `lengths .. lengths + T`, so a buffer needs T slots of slack beyond the last valid one
    (`dynamic_update_slice` would silently move a write that does not fit).

    A layer with relative positions keeps what it makes of each distance here, too: this depends on
    the parameters alone, but is as dear as a pass over S tokens.
    """

    keys: tuple[Array, ...]  # one [B, G, S, C] a layer
    values: tuple[Array, ...]  # one [B, G, S, C] a layer
    lengths: Array  # [B] int32, valid slots a row
    distances: tuple[Array | None, ...]  # one [H, S, C] a layer, of distances S-1, ..., 0; or None

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[2]

    def at(self, lengths: Array) -> "KVCache":
        """The same buffers with other lengths: a rollback, or an advance over written slots."""
        return dataclasses.replace(self, lengths=lengths)

    def layer(self, index: int) -> Layer:
        """The buffers of one layer."""
        return Layer(self.keys[index], self.values[index], self.lengths, self.distances[index])


def empty(num_layers: int, shape: tuple[int, ...], dtype, distances: tuple) -> KVCache:
    """A cache with nothing in it; `shape` is [B, G, S, C]."""
    buffers = tuple(jnp.zeros(shape, dtype) for _ in range(2 * num_layers))
    lengths = jnp.zeros(shape[0], jnp.int32)
    return KVCache(buffers[:num_layers], buffers[num_layers:], lengths, distances)


def write(buffer_BGSC: Array, update_BGTC: Array, starts_B: Array) -> Array:
    """Writes T entries of each row at the row's own start."""
    write_row = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write_row)(buffer_BGSC, update_BGTC, starts_B)


def causal_mask(positions_BT: Array, slots: int) -> Array:
    """[B, T, S] bool: a query sees the slots up to its own position, its own included.

    Slots and positions coincide for a chain, so this also hides every stale slot.
    """
    return jnp.arange(slots) <= positions_BT[:, :, None]


def window_mask(positions_BT: Array, slots: int, window: int) -> Array:
    """[B, T, S] bool: a query sees no slot that is `window` or more positions before its own."""
    return jnp.arange(slots) > positions_BT[:, :, None] - window
