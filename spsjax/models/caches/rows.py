"""Row operations on states, which are pytrees of arrays [B, ...] and of caches."""

import dataclasses

import jax
from jax import lax

from spsjax.models.caches.dense import KVCache
from spsjax.types import Array


def insert_row(state, row: Array, other):
    """Returns a pytree of arrays [B, ...] with the first row of `other` at index `row`."""

    def insert(array, new):
        return lax.dynamic_update_slice_in_dim(array, new[:1], row, axis=0)

    return _by_rows(insert, state, other)


def take_rows(state, rows_B: Array):
    """Returns the rows at indices `rows_B` of a pytree of arrays [B, ...]."""
    return _by_rows(lambda array: array[rows_B], state)


def _by_rows(function, *trees):
    """Maps over batched leaves; skips `KVCache.distances`, which have no batch axis."""

    def apply(*leaves):
        if not isinstance(leaves[0], KVCache):
            return function(*leaves)
        bare = (dataclasses.replace(cache, distances=()) for cache in leaves)
        return dataclasses.replace(jax.tree.map(function, *bare), distances=leaves[0].distances)

    return jax.tree.map(apply, *trees, is_leaf=lambda leaf: isinstance(leaf, KVCache))
