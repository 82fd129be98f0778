"""A cache of the first tokens of a text and of the last ones (Xiao et al. 2023, arXiv 2309.17453).

Its size does not grow with the text. The first tokens, the *sinks*, take up much attention in every
trained model; without them a window is of little use.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spsjax import tree
from spsjax.caches.dense import KVCache, row_major
from spsjax.parallel import sharding
from spsjax.types import Array, Block, pytree_dataclass


@pytree_dataclass
class WindowCache(KVCache):
    """Keys and values of the sinks, in slots of their own, then of the last tokens, in a ring.

    `held` is the position in each slot. The ring has `SLACK` slots more than the window, so that
    lengths can be set back by as many tokens.
    """

    held: Array  # [B, S] int32, position of the token that was last written to a slot; -1: none
    sinks: int = dataclasses.field(metadata={"static": True})

    ordered = False

    def positions(self) -> Array:
        return jnp.where(self.held < self.lengths[:, None], self.held, -1)

    def slots(self, positions: Array) -> Array:
        """Returns the slot of each position."""
        ring = self.num_slots - self.sinks
        return jnp.where(
            positions < self.sinks, positions, self.sinks + (positions - self.sinks) % ring
        )

    def filled(self, lengths_B: Array) -> "WindowCache":
        """Returns the cache as if tokens up to these lengths had been written to it."""
        slot, ring = jnp.arange(self.num_slots), self.num_slots - self.sinks
        last = lengths_B[:, None] - 1
        newest = last - (last - slot) % ring
        held = jnp.where(slot < self.sinks, slot, newest)
        empty = (held > last) | ((slot >= self.sinks) & (held < self.sinks))
        return dataclasses.replace(self, held=jnp.where(empty, -1, held), lengths=lengths_B)

    def write(self, block: Block, path_BP, lengths_B, after):
        """Returns the cache with the nodes of a path, or of the whole block, that are new and kept.

        They are at positions from the present lengths up to the new ones. Arguments as of
        `KVCache.write`.
        """
        positions = block.positions
        if path_BP is not None:
            positions = jnp.where(path_BP >= 0, tree.along(path_BP, positions), -1)
        ring = self.num_slots - self.sinks
        # Of a long block, the ring keeps the last tokens.
        lasts = (positions >= lengths_B[:, None] - ring) | (positions < self.sinks)
        kept = (positions >= self.lengths[:, None]) & (positions < lengths_B[:, None]) & lasts
        # What is not kept goes to a slot that does not exist. That it depends on `after`, in a way
        # that never matters, shows the compiler that the write comes after every read.
        nowhere = self.num_slots + jnp.isnan(after[:, :1, 0]).astype(jnp.int32)
        index = jnp.where(kept, self.slots(positions), nowhere)

        def put(buffer, rows, index):
            return buffer.at[..., index, :].set(rows, mode="drop")

        def scatter(buffer_BGSC, rows_BGPC):
            if path_BP is not None:
                rows_BGPC = tree.along(path_BP, rows_BGPC, axis=2)
            written = jax.vmap(put)(buffer_BGSC, rows_BGPC, index)
            return sharding.whole_heads(row_major(written))

        held = jax.vmap(put)(self.held[..., None], positions[..., None], index)[..., 0]
        return dataclasses.replace(
            self,
            keys=tuple(map(scatter, self.keys, block.keys)),
            values=tuple(map(scatter, self.values, block.values)),
            lengths=lengths_B,
            held=held,
        )


# How many tokens a window can be set back, so that it is still whole.
SLACK = 32


def empty_window(
    num_layers: int, shape: tuple[int, ...], dtype, distances: tuple, sinks: int
) -> WindowCache:
    """Returns a cache with nothing in it; `shape` is [B, G, S, C], with the slots of the sinks."""
    zeros = functools.partial(jnp.zeros, shape, dtype)
    keys, values = (tuple(zeros() for _ in range(num_layers)) for _ in range(2))
    held = jnp.full((shape[0], shape[2]), -1, jnp.int32)
    return WindowCache(keys, values, jnp.zeros(shape[0], jnp.int32), distances, held, sinks)
