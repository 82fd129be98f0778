"""Arrays per layer: a tuple of arrays, or one array with an axis of layers.

The second form belongs to models whose layers run in a loop (`models.layer_stack`).
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from spsjax.types import Array

Layered = tuple[Array, ...] | Array  # one [B, ...] per layer; or one [B, L, ...]


def zeros(num_layers: int, shape: tuple[int, ...], dtype, stacked: bool = False) -> Layered:
    """Returns zeros [B, ...] per layer, or in one array for all layers."""
    if stacked:
        return jnp.zeros((shape[0], num_layers, *shape[1:]), dtype)
    return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))


def is_stacked(arrays: Layered) -> bool:
    """Returns whether all layers are in one array."""
    return not isinstance(arrays, tuple)


def num_layers(arrays: Layered) -> int:
    """Returns the number of layers L."""
    return len(arrays) if isinstance(arrays, tuple) else arrays.shape[1]


def of_layer(arrays: Layered, layer: int | Array) -> Array:
    """Returns the array [B, ...] of one layer; the index of a stacked one may be traced."""
    if isinstance(arrays, tuple):
        return arrays[layer]
    return lax.dynamic_index_in_dim(arrays, layer, axis=1, keepdims=False)


def as_list(arrays: Layered) -> list[Array]:
    """Returns one array [B, ...] per layer."""
    return [of_layer(arrays, layer) for layer in range(num_layers(arrays))]


def joined(layers: Sequence[Array], stacked: bool) -> Layered:
    """Returns arrays [B, ...], one per layer, in one of the two forms."""
    return jnp.stack(layers, axis=1) if stacked else tuple(layers)
