"""Key-value caches, and blocks of tokens that are not cached yet.

Within a round a cache does not change. A forward pass attends to two segments, the cache and the
block of the round's nodes, and returns the extended block. `KVCache.write` then appends the rows of
the accepted path. So rejected tokens need no rollback, and a chain, a tree and a chunk of a prompt
are written in the same way.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from spsjax import tree
from spsjax.models.caches.recurrent import State
from spsjax.models.config import Config
from spsjax.parallel import sharding
from spsjax.types import Array, Block, ModelOutput, pytree_dataclass
from spsjax.utils import kernel_choice

# Of the keys and of the values of a layer; None: it has none.
Shapes = tuple[tuple[int, ...] | None, tuple[int, ...] | None]


@pytree_dataclass
class Segment:
    """Keys and values of one layer, from a cache or a block, with an attention mask."""

    keys: Array  # [B, G, S, C]
    values: Array  # [B, G, S, C]
    visible: Array  # [B, T or 1, S] bool
    positions: Array | None  # [B, S] int32; -1: empty. None: positions differ between key-value
    #   heads, and attention windows do not apply
    distances: Array | None  # see `KVCache.distances`
    ordered: bool = dataclasses.field(default=False, metadata={"static": True})  # whether slot i
    #   holds position i
    split: bool = dataclasses.field(default=False, metadata={"static": True})  # whether devices
    #   hold different slots


@pytree_dataclass
class KVCache:
    """Keys and values per layer, with a length per row. Slot i has the token at position i.

    Slots beyond `lengths` have stale entries, which are masked and never zeroed.

    A cache with more lengths than rows is shared and read-only. Each of its rows serves several
    consecutive rows of the batch, which attend to prefixes of different lengths.

    A recurrent layer has a `State` in the place of its keys, and no values. It belongs to the text
    that was written, so that lengths must not be reduced below it.

    `distances` are the projected relative positions of Transformer-XL. They depend on the
    parameters alone, and are cached because they take as long as a pass over S tokens.
    """

    keys: tuple[Any, ...]  # one [B, G, S, C] per layer, or its `State`; None: the layer has none
    values: tuple[Any, ...]  # one [B, G, S, C] per layer
    lengths: Array  # [B] int32, number of valid slots per row
    distances: tuple[Array | None, ...]  # one [H, S, C] per layer, for distances S-1, ..., 0

    ordered: ClassVar[bool] = True  # see `Segment.ordered`

    @property
    def num_slots(self) -> int:
        held = (keys for keys in self.keys if not isinstance(keys, State | None))
        return next(held).shape[2]

    @property
    def split(self) -> bool:
        """Whether the current mesh splits the slots."""
        return self.ordered and splits_slots(self.num_slots)

    def positions(self) -> Array:
        """Returns the position of the token in each slot [B, S] int32; -1: empty."""
        slots = jnp.arange(self.num_slots, dtype=jnp.int32)
        return jnp.where(slots < self.lengths[:, None], slots, -1)

    def segments(self) -> list[Any]:
        """Returns a tuple of segments per layer, whose tokens come before all new tokens.

        It is empty for a layer without keys. A recurrent layer has its `State` instead.
        """
        positions = self.positions()
        visible = positions[:, None] >= 0
        whole = functools.partial(sharding.whole_heads, split=self.split)
        kind = self.ordered, self.split
        return [
            (keys or ())
            if isinstance(keys, State | None)
            else (Segment(whole(keys), whole(values), visible, positions, distances, *kind),)
            for keys, values, distances in zip(self.keys, self.values, self.distances)
        ]

    def at(self, lengths_B: Array) -> "KVCache":
        """Returns a cache with the same buffers and other lengths."""
        return dataclasses.replace(self, lengths=lengths_B)

    def write(
        self, block: Block, path_BP: Array | None, lengths_B: Array, after_BTD: Array
    ) -> "KVCache":
        """Returns the cache with the block's rows along a path in its next P slots.

        All P rows of the path are written to slots `lengths .. lengths + P`, and the new lengths
        count the accepted ones. The buffer needs P slots beyond the last valid one. A write that
        does not fit would overwrite earlier slots.

        Args:
            block: keys and values of the round's nodes.
            path_BP: accepted nodes in order, then -1; None: all nodes of the block in order, as for
                a chain.
            lengths_B: new lengths.
            after_BTD: final hidden states of a pass that follows every read of this cache.
        """
        nodes = block.positions.shape[1] if path_BP is None else path_BP.shape[1]
        # The compiler copies the whole cache unless it knows that the write follows every read. So
        # the first slot depends on `after_BTD`, in a way that it cannot simplify. A NaN would only
        # raise the upper bound on the first slot, which no valid write reaches.
        last = self.num_slots - nodes + jnp.isnan(after_BTD[:, 0, 0]).astype(jnp.int32)
        starts = jnp.minimum(self.lengths, last)

        advance = lengths_B - self.lengths

        def along_path(rows_BGPC):
            return rows_BGPC if path_BP is None else tree.along(path_BP, rows_BGPC, axis=2)

        written, buffers, new = [*self.keys, *self.values], {}, {}
        for index, (entry, rows) in enumerate(zip(written, (*block.keys, *block.values))):
            if isinstance(entry, State):
                written[index] = entry.after(rows, path_BP, advance)
            elif entry is not None:
                buffers[index], new[index] = entry, along_path(rows)
        for index, buffer in self._with_rows(buffers, new, starts).items():
            written[index] = buffer
        keys, values = tuple(written[: len(self.keys)]), tuple(written[len(self.keys) :])
        return KVCache(keys, values, lengths_B, self.distances)

    def _with_rows(
        self, buffers: dict[int, Array], rows: dict[int, Array], starts_B: Array
    ) -> dict[int, Array]:
        """Returns buffers with new rows from slot `starts_B` on."""
        write = _write_split if self.split else _write_rows

        def plain(buffers, rows, starts_B):
            written = {at: write(buffer, rows[at], starts_B) for at, buffer in buffers.items()}
            return {
                at: sharding.whole_heads(row_major(buffer), self.split)
                for at, buffer in written.items()
            }

        kernels = kernel_choice.kernels_of("models.fused.writes")
        if kernels is None or self.split or not kernels.supports(buffers, rows):
            return plain(buffers, rows, starts_B)
        return kernel_choice.chosen(kernels.write, plain)(buffers, rows, starts_B)

    def extend(self, output: ModelOutput, until_B: Array | None = None) -> "KVCache":
        """Returns the cache with the tokens of a pass appended, as for a prompt.

        `until_B` are the lengths of rows whose last tokens are padding; None: no row has any.
        """
        lengths_B = self.lengths + output.block.positions.shape[1]
        if until_B is not None:
            lengths_B = jnp.clip(until_B, self.lengths, lengths_B)
        return self.write(output.block, None, lengths_B, output.hidden)


def shapes(config: Config, batch: int, slots: int) -> list[Shapes]:
    """Returns the shapes [B, G, S, C] of the keys and of the values of each layer."""
    sizes: list[Shapes] = []
    for layer in map(config.layer, range(config.num_layers)):
        has_keys = not layer.is_recurrent and layer.mixer != "shared"
        heads, (key, value) = (batch, layer.num_kv_heads, slots), layer.cache_widths
        sizes.append(((*heads, key), (*heads, value)) if has_keys else (None, None))
    return sizes


def zeros(layers: Sequence[Shapes], dtype) -> tuple[tuple[Any, ...], ...]:
    """Returns arrays of zeros for the keys, and for the values, of each layer."""
    arrays = [
        tuple(None if shape is None else jnp.zeros(shape, dtype) for shape in side)
        for side in zip(*layers)
    ]
    return arrays[0], arrays[1]


def _rows_and_slots(layers: Sequence[Shapes]) -> tuple[int, int]:
    batch, _, slots, _ = next(keys for keys, _ in layers if keys is not None)
    return batch, slots


def splits_slots(slots: int) -> bool:
    """Returns whether the current mesh splits a cache with this number of slots."""
    count = sharding.slots_axis()
    return count > 1 and slots % count == 0


def _write_rows(buffer_BGSC: Array, rows_BGPC: Array, starts_B: Array) -> Array:
    """Returns a buffer with new rows from slot `starts_B` on."""
    write_row = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write_row)(buffer_BGSC, rows_BGPC, starts_B)


def _write_split(buffer_BGSC: Array, rows_BGPC: Array, starts_B: Array) -> Array:
    """Does what `_write_rows` does if slots are split over devices, without a collective.

    Each device writes to as many of its slots as there are rows, with new rows where these belong
    to it, and with the old rows elsewhere.
    """
    count = sharding.slots_axis()
    local_slots = buffer_BGSC.shape[2] // count
    size = min(rows_BGPC.shape[2], local_slots)

    def local(buffer, rows, starts, begin):
        first = jnp.clip(starts - begin, 0, local_slots - size)
        index = (begin + first - starts)[:, None] + jnp.arange(size)  # new row for each slot
        cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=size, axis=1)
        old, new = jax.vmap(cut)(buffer, first), tree.along(index, rows, axis=2)
        is_new = (index >= 0) & (index < rows.shape[2])
        return _write_rows(buffer, jnp.where(is_new[:, None, :, None], new, old), first)

    begins, slots = jnp.arange(count, dtype=jnp.int32) * local_slots, P(None, None, "slots")
    return jax.shard_map(
        local,
        in_specs=(slots, P(), P(), P("slots")),
        out_specs=slots,
        axis_names={"slots"},
        check_vma=False,
    )(buffer_BGSC, rows_BGPC, starts_B, begins)


def row_major(buffer: Array) -> Array:
    """Returns the buffer with a row-major layout on TPUs.

    For writes of several rows, the TPU's compiler would otherwise convert every cache to another
    layout before the loop and back after it, which takes a second copy of all caches.
    """

    # Other platforms do not need the constraint, and the CPU's compiler gathers a constrained array
    # over the mesh. A constrained array must not be a direct result of the program: JAX 0.10 then
    # lets XLA choose the layouts of all results, and reads them in the wrong order. A result of
    # `platform_dependent` is not affected.
    def constrained(buffer):
        return with_layout_constraint(buffer, Layout(tuple(range(buffer.ndim))))

    return lax.platform_dependent(buffer, tpu=constrained, default=lambda buffer: buffer)


def empty(layers: Sequence[Shapes], dtype, distances: Sequence[Array | None] = ()) -> KVCache:
    """Returns an empty cache of layers of these `shapes`; no `distances`: None per layer."""
    (keys, values), (batch, slots) = zeros(layers, dtype), _rows_and_slots(layers)
    if splits_slots(slots):
        split = functools.partial(sharding.whole_heads, split=True)
        keys, values = jax.tree.map(split, (keys, values))
    distances = tuple(distances) or (None,) * len(layers)
    return KVCache(keys, values, jnp.zeros(batch, jnp.int32), distances)


def empty_block(layers: Sequence[Shapes], dtype) -> Block:
    """Returns an empty block of layers of these `shapes`, whose slots are its places."""
    (keys, values), (batch, nodes) = zeros(layers, dtype), _rows_and_slots(layers)
    positions = jnp.full((batch, nodes), -1, jnp.int32)
    return Block(keys, values, positions, jnp.zeros((), jnp.int32))
