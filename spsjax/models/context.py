"""Positions and attention masks of one forward pass."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.models import caches as kv
from spsjax.models.config import Config
from spsjax.parallel import sharding
from spsjax.types import Array, Block, PyTree, pytree_dataclass

KeysValues = tuple[Any, Any]  # [B, G, P, C] each; None: a layer without keys


@pytree_dataclass
class Context:
    """Positions and attention masks of one forward pass, shared by all layers.

    Attributes:
        positions: positions of the tokens [B, T].
        block_positions: positions of the block's nodes [B, P], these tokens included.
        block_visible: nodes to which each token attends [B, T, P] bool.
        size: number of nodes in the block before these tokens []; None: the block is new.
        contiguous: whether the block has only these tokens, at consecutive positions.
    """

    positions: Array
    block_positions: Array
    block_visible: Array
    size: Array | None
    contiguous: bool = dataclasses.field(metadata={"static": True})

    def append(self, earlier: KeysValues | None, keys: Array, values: Array) -> KeysValues:
        """Returns the block's keys and values with those of these tokens appended."""
        return self.appended(earlier, (jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)))

    def appended(self, earlier: PyTree | None, rows: PyTree) -> PyTree:
        """Returns arrays [B, heads, P, ...] of the block with rows of these tokens appended."""
        rows, size = jax.tree.map(sharding.whole_heads, rows), self.size
        if earlier is None or size is None:  # both, if the block is new
            return rows

        def append(old: Array, new: Array) -> Array:
            return sharding.whole_heads(lax.dynamic_update_slice_in_dim(old, new, size, axis=2))

        return jax.tree.map(append, earlier, rows)

    def block(self, layers: Sequence[KeysValues], batch: int) -> Block:
        """Returns the block of the keys and values that `append` returned in each layer."""
        keys, values = zip(*layers)
        shape = batch, self.block_positions.shape[1]
        earlier = 0 if self.size is None else self.size
        size = jnp.asarray(self.positions.shape[1] + earlier, jnp.int32)
        return Block(keys, values, jnp.broadcast_to(self.block_positions, shape), size)

    def segments(
        self,
        config: Config,
        cached: Sequence[kv.Segment],
        keys_BGPC: Array,
        values_BGPC: Array,
    ) -> list[kv.Segment]:
        """Returns the segments to which the tokens attend: a layer's cache and block.

        `config` is the layer's own.
        """
        block = kv.Segment(keys_BGPC, values_BGPC, self.block_visible, self.block_positions, None)
        return [self._windowed(config, segment) for segment in (*cached, block)]

    def _windowed(self, config: Config, segment: kv.Segment) -> kv.Segment:
        """Returns a segment whose mask also excludes tokens outside of the attention windows."""
        if segment.positions is None:
            return segment
        key_positions, visible = segment.positions[:, None], segment.visible
        if config.recent:
            is_recent = key_positions > self.positions[:, :, None] - config.recent
            visible = visible & (is_recent | (key_positions < config.sinks))
        if window := config.window(0):
            visible = visible & (key_positions > self.positions[:, :, None] - window)
        return dataclasses.replace(segment, visible=visible)

    def capped_positions(self, config: Config) -> Array:
        """Returns the tokens' positions [B, T] for attention to the sinks.

        They are positions in a text without the tokens between the sinks and the window, as in
        StreamingLLM (Xiao et al. 2023, 3.2).
        """
        return jnp.minimum(self.positions, config.sinks + config.recent - 1)


def context_of(
    num_tokens: int,
    cache: kv.KVCache | None,
    block: Block | None = None,
    positions_BT: Array | None = None,
    ancestors: Array | None = None,
) -> Context:
    """Returns the positions and masks of a forward pass.

    The arguments are those of `transformer.apply`.
    """
    contiguous = block is None and positions_BT is None and ancestors is None
    if positions_BT is None:
        # Without a cache all rows have the same positions, so one row of masks suffices.
        start = jnp.zeros(1, jnp.int32) if cache is None else cache.lengths
        start = start if block is None else start + block.size
        positions_BT = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    positions_BT = jnp.asarray(positions_BT, jnp.int32)
    if block is not None:
        rows = block.positions.shape[0]
        positions_BT = jnp.broadcast_to(positions_BT, (rows, num_tokens))
    block_positions = positions_BT
    if block is not None:
        block_positions = lax.dynamic_update_slice_in_dim(
            block.positions, positions_BT, block.size, axis=1
        )
    visible = block_positions[:, None] >= 0
    if ancestors is None:
        visible = visible & (block_positions[:, None] <= positions_BT[:, :, None])
    else:
        visible = visible & ancestors
    size = None if block is None else block.size
    return Context(positions_BT, block_positions, visible, size, contiguous)


def finite_values(key_BTGC: Array, value_BTGC: Array) -> KeysValues:
    """Returns keys and values, with the non-finite entries of values moved to the keys.

    A masked slot has weight 0, but 0 x NaN is NaN: a NaN in a value would reach all queries. A NaN
    in a key reaches only the queries that attend to the slot.
    """
    finite = jnp.isfinite(value_BTGC)
    return jnp.where(finite, key_BTGC, jnp.nan), jnp.where(finite, value_BTGC, 0)
