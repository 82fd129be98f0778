"""Rows of states: pytrees of arrays [B, ...] and of caches."""

import dataclasses

import jax
from jax import lax

from spsjax.caches.dense import KVCache
from spsjax.types import Array


def insert_row(state, row: Array, other):
    """Returns a pytree of arrays [B, ...] with the first row of `other` at index `row`."""

    def insert(mine, theirs):
        return lax.dynamic_update_slice_in_dim(mine, theirs[:1], row, axis=0)

    return _by_rows(insert, state, other)


def take_rows(state, rows_B: Array):
    """Returns some rows of a pytree of arrays [B, ...]."""
    return _by_rows(lambda array: array[rows_B], state)


def _by_rows(function, *trees):
    """Maps a function over the arrays of pytrees that have rows, not over distances of caches."""

    def apply(*leaves):
        if not isinstance(leaves[0], KVCache):
            return function(*leaves)
        bare = (dataclasses.replace(cache, distances=()) for cache in leaves)
        return dataclasses.replace(jax.tree.map(function, *bare), distances=leaves[0].distances)

    return jax.tree.map(apply, *trees, is_leaf=lambda leaf: isinstance(leaf, KVCache))
