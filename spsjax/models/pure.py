"""Flax modules as pure functions of nested dicts of arrays.

A module is a class with a hashable config as argument: `module(config, dtype=..., rngs=...)`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.types import Array, PyTree


@functools.lru_cache
def _abstract(module, config, dtype):
    return nnx.eval_shape(lambda: module(config, dtype=dtype, rngs=nnx.Rngs(0)))


def param_shapes(module, config, dtype=jnp.float32) -> PyTree:
    """Returns the parameters' shapes as a nested dict of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.state(_abstract(module, config, jnp.dtype(dtype)), nnx.Param))


def init(module, config, key: Array, dtype=jnp.float32) -> PyTree:
    """Returns random parameters as a nested dict of arrays."""
    instance = module(config, dtype=dtype, rngs=nnx.Rngs(key))
    return nnx.to_pure_dict(nnx.state(instance, nnx.Param))


def bind(module, config, params: PyTree, dtype):
    """Returns the module with these parameters and this compute type."""
    graph, state = nnx.split(_abstract(module, config, jnp.dtype(dtype)), nnx.Param)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy, because `_abstract` is cached
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
