"""Key-value caches, and the blocks of tokens that are attended to beside them.

Within a round a cache is only read. A forward pass attends to two segments, the cache and the
block of the round's nodes, and returns the grown block. `KVCache.write` then appends the rows of
the accepted path: the only place where a cache changes. So there is nothing to roll back, whatever
was rejected, and a chain, a tree and a chunk of a prompt are written alike.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from spsjax import tree
from spsjax.parallel import sharding
from spsjax.types import Array, Block, ModelOutput, pytree_dataclass


@pytree_dataclass
class Segment:
    """Keys and values of one layer, from a cache or a block, and a mask of what tokens see."""

    keys: Array  # [B, G, S, C]
    values: Array  # [B, G, S, C]
    visible: Array  # [B, T or 1, S] bool
    positions: Array | None  # [B, S] int32; -1: nothing is here. None: positions differ between
    #   key-value heads, and nothing is too far back
    distances: Array | None  # see `KVCache.distances`
    ordered: bool = dataclasses.field(default=False, metadata={"static": True})  # whether slot i
    #   holds position i
    split: bool = dataclasses.field(default=False, metadata={"static": True})  # whether devices
    #   hold different slots


@pytree_dataclass
class KVCache:
    """Keys and values per layer, with a length per row: slot i holds the token of position i.

    `lengths` is the only truth. What lies beyond it is stale and masked, never zeroed.

    A cache with more lengths than rows is shared, and is only read: each of its rows serves as many
    consecutive rows of a batch, which see different parts of it.

    `distances` are the projected relative positions of layers that have them. They depend on the
    parameters alone, but computing them takes as long as a pass over S tokens.
    """

    keys: tuple[Array, ...]  # one [B, G, S, C] per layer
    values: tuple[Array, ...]  # one [B, G, S, C] per layer
    lengths: Array  # [B] int32, valid slots per row
    distances: tuple[Array | None, ...]  # one [H, S, C] per layer, for distances S-1, ..., 0

    ordered: ClassVar[bool] = True  # see `Segment.ordered`

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[2]

    @property
    def split(self) -> bool:
        """Whether the current mesh splits the slots."""
        return self.ordered and splits_slots(self.num_slots)

    def positions(self) -> Array:
        """Returns [B, S] int32: the position of the token in each slot, -1 if there is none."""
        slots = jnp.arange(self.num_slots, dtype=jnp.int32)
        return jnp.where(slots < self.lengths[:, None], slots, -1)

    def segments(self) -> list[tuple[Segment, ...]]:
        """Returns the segments of each layer. What they hold comes before new tokens."""
        positions = self.positions()
        visible = positions[:, None] >= 0
        whole = functools.partial(sharding.whole_heads, split=self.split)
        kind = self.ordered, self.split
        return [
            (Segment(whole(keys), whole(values), visible, positions, distances, *kind),)
            for keys, values, distances in zip(self.keys, self.values, self.distances)
        ]

    def at(self, lengths: Array) -> "KVCache":
        """Returns the same buffers with other lengths."""
        return dataclasses.replace(self, lengths=lengths)

    def write(
        self, block: Block, path_BP: Array | None, lengths_B: Array, after: Array
    ) -> "KVCache":
        """Returns the cache with the block's rows along a path in its next P slots.

        The path's rows land in slots `lengths .. lengths + P`, of which the new lengths keep as
        many as were accepted. A buffer needs P slots beyond the last valid one: a write that does
        not fit would land in earlier slots.

        Args:
            block: keys and values of the round's nodes.
            path_BP: nodes in the order in which they become tokens, then -1; None: all nodes of
                the block in their own order, of which a chain keeps the first.
            lengths_B: the new lengths.
            after: [B, T, D] final hidden states of a pass that follows every read of this cache.
        """
        nodes = block.positions.shape[1] if path_BP is None else path_BP.shape[1]
        # The compiler copies the whole cache unless it sees that the write comes after every read.
        # So the first slot depends on `after`, in a way that never changes it but cannot be seen
        # through: no write starts beyond the last slot in which it fits.
        last = self.num_slots - nodes + jnp.isnan(after[:, 0, 0]).astype(jnp.int32)
        starts = jnp.minimum(self.lengths, last)
        write = _write_split if self.split else _write_rows

        def append(buffer_BGSC, rows_BGPC):
            if path_BP is not None:
                rows_BGPC = tree.along(path_BP, rows_BGPC, axis=2)
            written = write(buffer_BGSC, rows_BGPC, starts)
            return sharding.whole_heads(row_major(written), self.split)

        return KVCache(
            tuple(map(append, self.keys, block.keys)),
            tuple(map(append, self.values, block.values)),
            lengths_B,
            self.distances,
        )

    def extend(self, output: ModelOutput) -> "KVCache":
        """Returns the cache with all tokens of a pass behind what it holds, as for a prompt."""
        tokens = output.block.positions.shape[1]
        return self.write(output.block, None, self.lengths + tokens, output.hidden)


def splits_slots(slots: int) -> bool:
    """Returns whether the current mesh splits a cache of so many slots."""
    count = sharding.slots_axis()
    return count > 1 and slots % count == 0


def _write_rows(buffer_BGSC: Array, rows_BGPC: Array, starts_B: Array) -> Array:
    """Returns a buffer with new rows from the given slots on."""
    write_row = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write_row)(buffer_BGSC, rows_BGPC, starts_B)


def _write_split(buffer_BGSC: Array, rows_BGPC: Array, starts_B: Array) -> Array:
    """Does what `_write_rows` does where devices hold different slots, without a collective.

    Each device writes to some of its slots, as many as there are rows: what is new there, and what
    they held.
    """
    count = sharding.slots_axis()
    here = buffer_BGSC.shape[2] // count
    most = min(rows_BGPC.shape[2], here)

    def local(buffer, rows, starts, begin):
        first = jnp.clip(starts - begin, 0, here - most)
        index = (begin + first - starts)[:, None] + jnp.arange(most)  # of the row for each slot
        cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=most, axis=1)
        old, new = jax.vmap(cut)(buffer, first), tree.along(index, rows, axis=2)
        is_new = (index >= 0) & (index < rows.shape[2])
        return _write_rows(buffer, jnp.where(is_new[:, None, :, None], new, old), first)

    begins, slots = jnp.arange(count, dtype=jnp.int32) * here, P(None, None, "slots")
    return jax.shard_map(
        local,
        in_specs=(slots, P(), P(), P("slots")),
        out_specs=slots,
        axis_names={"slots"},
        check_vma=False,
    )(buffer_BGSC, rows_BGPC, starts_B, begins)


def row_major(buffer: Array) -> Array:
    """Keeps the order of a buffer's axes in a TPU's memory.

    Where several rows are written, the TPU's compiler would otherwise convert every cache to
    another layout before the loop, and back after it. That takes a second copy of all caches.
    """

    # Other platforms do not need the constraint, and the CPU's compiler gathers a constrained array
    # over the mesh. The constrained array must not itself be a result of the program: JAX 0.10 then
    # leaves the layouts of all results to XLA, and reads the results in the wrong order. The result
    # of `platform_dependent` is not affected.
    def constrained(buffer):
        return with_layout_constraint(buffer, Layout(tuple(range(buffer.ndim))))

    return lax.platform_dependent(buffer, tpu=constrained, default=lambda buffer: buffer)


def empty(num_layers: int, shape: tuple[int, ...], dtype, distances: tuple) -> KVCache:
    """Returns a cache with nothing in it; `shape` is [B, G, S, C]."""
    buffers = tuple(jnp.zeros(shape, dtype) for _ in range(2 * num_layers))
    if splits_slots(shape[2]):
        buffers = tuple(sharding.whole_heads(buffer, split=True) for buffer in buffers)
    lengths = jnp.zeros(shape[0], jnp.int32)
    return KVCache(buffers[:num_layers], buffers[num_layers:], lengths, distances)


def empty_block(num_layers: int, shape: tuple[int, ...], dtype) -> Block:
    """Returns a block of no nodes yet, with room for P; `shape` is [B, G, P, C]."""
    buffers = tuple(jnp.zeros(shape, dtype) for _ in range(2 * num_layers))
    return Block(
        buffers[:num_layers],
        buffers[num_layers:],
        jnp.full((shape[0], shape[2]), -1, jnp.int32),
        jnp.zeros((), jnp.int32),
    )
