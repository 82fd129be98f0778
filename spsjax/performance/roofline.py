"""A forward pass at its floor: what one chip of a mesh must hold, read, multiply and send."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.performance import hlo
from spsjax.performance.hardware import Chip
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass at its floor, on one chip.

    Attributes:
        weights: bytes of weights that it reads.
        cache: bytes of the cache that it reads, were all slots taken.
        flops: of its products with weights.
        collectives: how many.
        memory_seconds, compute_seconds, interconnect_seconds: were each all that counts. The last
            is bytes over bandwidth, and what each collective is assumed to take besides.
    """

    weights: int
    cache: int
    flops: float
    collectives: int
    memory_seconds: float
    compute_seconds: float
    interconnect_seconds: float

    @property
    def seconds(self) -> float:
        """Weights stream while they are multiplied; a collective waits for its layer."""
        return max(self.memory_seconds, self.compute_seconds) + self.interconnect_seconds


def abstract_params(config: transformer.Config, mesh: Mesh, dtype) -> PyTree:
    """The parameters' shapes, types and places."""

    def place(path, leaf):
        how = sharding.param_spec(tuple(entry.key for entry in path), mesh, config)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=NamedSharding(mesh, how))

    return jax.tree_util.tree_map_with_path(place, transformer.param_shapes(config, dtype))


def num_bytes(tree: PyTree) -> int:
    """Bytes of the arrays on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def cache_bytes(config: transformer.Config, mesh: Mesh, batch: int, slots: int, dtype) -> int:
    """Bytes of a cache on one device, by the rules of `sharding`."""
    model = mesh.shape["model"]
    heads = config.num_kv_heads // (1 if config.num_kv_heads % model else model)
    per_head = slots * config.head_dim * jnp.dtype(dtype).itemsize * config.num_layers
    total = 2 * (batch // mesh.shape["data"]) * heads * per_head
    if config.positions == "relative":
        total += config.num_heads // model * per_head
    return total


def _read(config: transformer.Config, params: PyTree) -> PyTree:
    """The parameters that a pass over a cache multiplies with.

    An embedding is looked up, unless it is the head, too; the projections of relative positions
    were applied when the cache was made.
    """
    kept = params if config.tie_embeddings else params | {"embed": {}}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if any(entry.key == "position" for entry in path) else leaf, kept
    )


def floor(
    chip: Chip,
    mesh: Mesh,
    config: transformer.Config,
    collectives: Sequence[hlo.Collective],
    tokens: int,
    batch: int,
    slots: int,
    dtype,
    collective_us: float,
) -> Pass:
    """One pass over `tokens` a row; the collectives are those of a pass over one token."""
    weights = num_bytes(_read(config, abstract_params(config, mesh, dtype)))
    cache = cache_bytes(config, mesh, batch, slots, dtype)
    rows = tokens * batch // mesh.shape["data"]
    flops = 2 * rows * weights / jnp.dtype(dtype).itemsize
    moved = rows / (batch // mesh.shape["data"]) * sum(c.num_bytes for c in collectives)
    ring = 2 * (1 - 1 / mesh.shape["model"])  # an all-reduce passes every byte twice
    return Pass(
        weights=weights,
        cache=cache,
        flops=flops,
        collectives=len(collectives),
        memory_seconds=(weights + cache) / chip.bandwidth,
        compute_seconds=flops / chip.flops,
        interconnect_seconds=ring * moved / (chip.interconnect / 2)
        + len(collectives) * collective_us * 1e-6,
    )
