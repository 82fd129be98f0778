"""Key-value cache of a window: the first and last tokens of a text (Xiao et al. 2023, 2309.17453).

Its size does not grow with the text. The first tokens are attention *sinks*: trained models attend
to them strongly, and a window without them gives poor predictions.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spsjax import tree
from spsjax.models.caches.dense import KVCache, Shapes, row_major, zeros
from spsjax.parallel import sharding
from spsjax.types import Array, Block, pytree_dataclass


@pytree_dataclass
class WindowCache(KVCache):
    """Keys and values of the sinks in fixed slots, then of the last tokens in a ring buffer.

    The ring has `SLACK` more slots than the window, so that lengths can be reduced by up to this
    number of tokens.
    """

    slot_positions: Array  # [B, S] int32, position of the token last written to a slot; -1: none
    sinks: int = dataclasses.field(metadata={"static": True})

    ordered = False

    def positions(self) -> Array:
        return jnp.where(self.slot_positions < self.lengths[:, None], self.slot_positions, -1)

    def slots(self, positions: Array) -> Array:
        """Returns the slot for each position."""
        ring = self.num_slots - self.sinks
        return jnp.where(
            positions < self.sinks, positions, self.sinks + (positions - self.sinks) % ring
        )

    def filled(self, lengths_B: Array) -> "WindowCache":
        """Returns the cache with the slot positions that it has after writes up to `lengths_B`."""
        slot, ring = jnp.arange(self.num_slots), self.num_slots - self.sinks
        last = lengths_B[:, None] - 1
        newest = last - (last - slot) % ring
        positions = jnp.where(slot < self.sinks, slot, newest)
        empty = (positions > last) | ((slot >= self.sinks) & (positions < self.sinks))
        positions = jnp.where(empty, -1, positions)
        return dataclasses.replace(self, slot_positions=positions, lengths=lengths_B)

    def write(self, block: Block, path_BP, lengths_B, after_BTD):
        """Returns the cache with the block's rows along a path.

        Rows are written if their positions are between the current and the new lengths. The
        arguments are those of `KVCache.write`.
        """
        positions = block.positions
        if path_BP is not None:
            positions = jnp.where(path_BP >= 0, tree.along(path_BP, positions), -1)
        ring = self.num_slots - self.sinks
        # If a block is longer than the ring, only its last tokens are written.
        fits = (positions >= lengths_B[:, None] - ring) | (positions < self.sinks)
        is_new = (positions >= self.lengths[:, None]) & (positions < lengths_B[:, None]) & fits
        # Other rows get an index beyond the buffer, and are dropped. The index depends without
        # effect on `after_BTD`, which tells the compiler that the write follows every read.
        dropped = self.num_slots + jnp.isnan(after_BTD[:, :1, 0]).astype(jnp.int32)
        index = jnp.where(is_new, self.slots(positions), dropped)

        def put(buffer, rows, index):
            return buffer.at[..., index, :].set(rows, mode="drop")

        def scatter(buffer_BGSC, rows_BGPC):
            if path_BP is not None:
                rows_BGPC = tree.along(path_BP, rows_BGPC, axis=2)
            written = jax.vmap(put)(buffer_BGSC, rows_BGPC, index)
            return sharding.whole_heads(row_major(written))

        old = self.slot_positions[..., None]
        slot_positions = jax.vmap(put)(old, positions[..., None], index)[..., 0]
        keys, values = jax.tree.map(scatter, (self.keys, self.values), (block.keys, block.values))
        return dataclasses.replace(
            self, keys=keys, values=values, lengths=lengths_B, slot_positions=slot_positions
        )


# Most tokens by which a length can be reduced so that the window is still complete.
SLACK = 32


def empty_window(layers: Sequence[Shapes], dtype, distances: tuple, sinks: int) -> WindowCache:
    """Returns an empty cache of layers of these `shapes`, which count the slots of the sinks."""
    keys, values = zeros(layers, dtype)
    batch, _, slots, _ = keys[0].shape
    lengths = jnp.zeros(batch, jnp.int32)
    slot_positions = jnp.full((batch, slots), -1, jnp.int32)
    return WindowCache(keys, values, lengths, distances, slot_positions, sinks)
