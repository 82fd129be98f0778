"""Array functions for units of k consecutive entries of a sequence."""

import jax.numpy as jnp
from jax import lax

from spsjax.types import Array, Block


def rows(array: Array) -> Array:
    """Returns an array with its first two axes merged: [B, T, ...] -> [B T, ...]."""
    return array.reshape(-1, *array.shape[2:])


def put(buffer: Array, entries: Array, start: int | Array) -> Array:
    """Returns a buffer with new entries from column `start` on."""
    return lax.dynamic_update_slice_in_dim(buffer, entries.astype(buffer.dtype), start, axis=1)


def last(array_BT: Array, k: int) -> Array:
    """Returns the last k entries up to each entry, padded with 0: [B, T, ...] -> [B, T, k, ...]."""
    padding = [(0, 0), (k - 1, 0)] + [(0, 0)] * (array_BT.ndim - 2)
    index = jnp.arange(array_BT.shape[1])[:, None] + jnp.arange(k)
    return jnp.pad(array_BT, padding)[:, index]


def at_indices(block: Block, batch: int, index: Array) -> Block:
    """Returns the rows of given indices from a block with one row per text and index."""

    def take(array: Array) -> Array:
        return rows(array.reshape(batch, -1, *array.shape[1:])[:, index])

    keys, values = (tuple(map(take, arrays)) for arrays in (block.keys, block.values))
    return Block(keys, values, take(block.positions), block.size)
