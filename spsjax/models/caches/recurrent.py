"""Recurrent states of a hybrid model, as entries of its cache and of its blocks.

A state cannot be cut back. So it stays where the committed tokens end, and the nodes of a round
keep what moves it (`models.delta_rule`). `KVCache.write` then adds the updates of the accepted
path.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from spsjax import tree
from spsjax.models import delta_rule
from spsjax.models.config import Config
from spsjax.parallel import sharding
from spsjax.types import Array, Block, PyTree, pytree_dataclass


@pytree_dataclass
class Nodes:
    """Part of a block of a gated delta net, in `Block.keys`."""

    inputs: tuple[Array, ...]  # inputs of the convolutions of query, key and value: one
    #   [B, heads, P, C] each
    updates: delta_rule.Updates


@pytree_dataclass
class State:
    """State of a gated delta net after the tokens of a cache, in `KVCache.keys`."""

    inputs: tuple[Array, ...]  # last inputs of the convolutions: one [B, heads, W - 1, C] each;
    #   zeros before the first token
    memory: Array  # [B, H, C, V] float32 or float64

    def after(self, nodes: Nodes, path_BP: Array | None, count_B: Array) -> "State":
        """Returns the state after the first `count_B` nodes of a path; None: all nodes in order."""
        inputs, node = nodes.inputs, jnp.arange(nodes.updates.keys.shape[2])
        if path_BP is None:
            accepted = node < count_B[:, None]
        else:
            inputs = tuple(tree.along(path_BP, rows, axis=2) for rows in inputs)
            taken = (path_BP >= 0) & (jnp.arange(path_BP.shape[1]) < count_B[:, None])
            accepted = jnp.any(taken[..., None] & (path_BP[..., None] == node), axis=1)

        def last(old: Array, new: Array) -> Array:
            """Returns the last inputs after `count_B` new ones."""
            index = jnp.maximum(count_B, 0)[:, None] + jnp.arange(old.shape[2])
            both = jnp.concatenate([old, new.astype(old.dtype)], axis=2)
            return sharding.whole_heads(tree.along(index, both, axis=2))

        memory = delta_rule.advance(self.memory, nodes.updates, accepted)
        return State(tuple(map(last, self.inputs, inputs)), sharding.whole_heads(memory))


def with_states(config: Config, cache: Any, dtype) -> Any:
    """Returns an empty `KVCache` with a state per recurrent layer."""
    batch, wide = len(cache.lengths), jnp.promote_types(dtype, jnp.float32)

    def state(layer: Config) -> State:
        rows = _inputs(layer, batch, layer.delta_taps - 1, dtype)
        return State(rows, jnp.zeros((batch, *_memory(layer)), wide))

    return _with_entries(config, cache, state)


def with_nodes(config: Config, block: Block, dtype) -> Block:
    """Returns an empty block with room for its nodes in each recurrent layer."""
    (batch, nodes), wide = block.positions.shape, jnp.promote_types(dtype, jnp.float32)

    def entry(layer: Config) -> Nodes:
        H, C, V = _memory(layer)
        keys = jnp.zeros((batch, layer.num_kv_heads, nodes, C), wide)
        updates, decays = (jnp.zeros((batch, H, nodes, width), wide) for width in (V, 1))
        rows = _inputs(layer, batch, nodes, dtype)
        return Nodes(rows, delta_rule.Updates(keys, updates, decays))

    return _with_entries(config, block, entry)


def _with_entries(config: Config, held: Any, entry: Callable[[Config], PyTree]) -> Any:
    layers = map(config.layer, range(len(held.keys)))
    pairs = zip(layers, held.keys)
    keys = tuple(entry(layer) if layer.is_recurrent else kept for layer, kept in pairs)
    return dataclasses.replace(held, keys=keys)


def _inputs(layer: Config, batch: int, rows: int, dtype) -> tuple[Array, ...]:
    H, C, V = _memory(layer)
    heads = (layer.num_kv_heads, C), (layer.num_kv_heads, C), (H, V)
    return tuple(jnp.zeros((batch, count, rows, width), dtype) for count, width in heads)


def _memory(layer: Config) -> tuple[int, int, int]:
    """Returns the shape [H, C, V] of a row's memory."""
    return layer.num_heads, layer.head_dim, layer.value_dim
