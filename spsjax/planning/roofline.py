"""Lower bounds on the time of a forward pass: bytes, operations and collectives per chip."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spsjax.models import caches as kv
from spsjax.models import quantization, transformer
from spsjax.parallel import sharding
from spsjax.planning import mixtures
from spsjax.planning.hardware import Chip
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class PassCost:
    """Cost of one forward pass on one chip, and the lower bounds that follow from it.

    Of several equal passes, the collectives are the mean.
    """

    weights: int  # bytes of weights that the pass reads
    cache: int  # bytes of the cache that the pass reads if every slot is filled
    flops: float  # operations of the products with weights
    collectives: float  # number of collectives
    memory_seconds: float  # time to read weights and cache at the published bandwidth
    compute_seconds: float  # time of the operations at the published peak
    # Time to send the collectives' bytes at the published bandwidth, and the time that each
    # collective is assumed to take besides.
    interconnect_seconds: float
    times: int = 1  # number of these passes per round, one after another

    @property
    def seconds(self) -> float:
        """Lower bound on the time of the pass."""
        # Weights are read while others are multiplied, but a collective waits for its layer.
        return max(self.memory_seconds, self.compute_seconds) + self.interconnect_seconds


def abstract_params(
    config: transformer.Config, mesh: Mesh, dtype, quantize: str | None = None
) -> PyTree:
    """Returns the shapes, types and shardings of the parameters; `quantize` is as for `load`."""
    shapes = transformer.param_shapes(config, dtype)
    placed = sharding.shard_shapes(shapes, sharding.param_shardings(mesh, config))
    return quantization.quantize(placed, quantize, config.tie_embeddings) if quantize else placed


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of the arrays on one device."""
    return sum(_size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(leaf) -> int:
    """Returns the number of an array's elements on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def cache_bytes(
    config: transformer.Config, mesh: Mesh, batch: int, slots: int, dtype, replicate: bool = False
) -> int:
    """Returns the bytes of a cache on one device, by the rules of `sharding`."""
    if not slots:  # a drafter that reads the target's
        return 0
    model, bytes_each = 1 if replicate else mesh.shape["model"], jnp.dtype(dtype).itemsize
    rows, shards = batch // mesh.shape["data"], mesh.shape.get("slots", 1)
    shards = 1 if config.recent or slots % shards else shards
    total = 0
    for array in jax.tree.leaves(jax.eval_shape(lambda: _entries(config, rows, slots, dtype))):
        # Heads that the mesh does not divide are replicated, and so are windows and states.
        heads, split = array.shape[1], shards if array.shape[2] == slots else 1
        total += array.size * array.dtype.itemsize // split // (1 if heads % model else model)
    if config.positions == "relative":
        # The cache also holds the projected relative positions, which rows share.
        per_head = slots * config.head_dim * bytes_each * config.num_layers
        total += config.num_heads // model * per_head
    return total


def _entries(config: transformer.Config, rows: int, slots: int, dtype) -> PyTree:
    """Returns keys, values and recurrent states of an empty cache."""
    cache = kv.with_states(config, kv.empty(kv.shapes(config, rows, slots), dtype), dtype)
    return cache.keys, cache.values


def multiplied(config: transformer.Config, params: PyTree) -> PyTree:
    """Returns the parameters that a pass of a model, or of a layer, multiplies with.

    An embedding is looked up, not multiplied, unless it also is the head; so is a learned
    position. The projections of relative positions were applied when the cache was made.
    """
    unused = {"position", "position_embed", "input_table"}
    unused |= set() if config.tie_embeddings else {"embed"}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if unused.isdisjoint(_keys(path)) else None,
        params,
        is_leaf=quantization.is_matrix,
    )


def _keys(path) -> list[str]:
    """Returns the keys of dicts in a path of a pytree."""
    return [str(getattr(entry, "key", "")) for entry in path]


def _experts_apart(params: PyTree) -> tuple[list, list, int]:
    """Returns the arrays that every token needs, the experts' arrays, and the number of experts."""
    common, experts, number = [], [], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if any(key.startswith("experts_") for key in _keys(path)):
            experts.append(leaf)
            number = leaf.shape[0]
        else:
            common.append(leaf)
    return common, experts, number


def lower_bound(
    chip: Chip,
    mesh: Mesh,
    params: PyTree,
    cache: int,
    tokens: int,
    batch: int,
    *,
    collectives: float,
    moved: float,
    collective_us: float,
    per_token: int = 0,
    times: int = 1,
) -> PassCost:
    """Returns the cost of one pass, from published figures of the chip.

    Of a mixture, the pass reads the experts that some token chooses, if all are equally popular and
    tokens choose independently; `per_token` is the number of experts per token. `collectives` is
    the number of collectives and `moved` the bytes of their results. `cache` is in bytes per
    device. A collective is assumed to take `collective_us` microseconds in addition to the time of
    its bytes. `times` is the number of these passes per round.
    """
    rows = tokens * batch // mesh.shape["data"]
    common, experts, number = _experts_apart(params)
    shares = mixtures.popularity(number, per_token) if number else ()
    read = mixtures.distinct_experts(shares, rows) / max(number, 1)
    weights = num_bytes(common) + round(num_bytes(experts) * read)
    used = per_token / max(number, 1)
    flops = 2 * rows * (sum(map(_size, common)) + used * sum(map(_size, experts)))
    # A ring all-reduce sends every byte twice: once to reduce, once to distribute the sums.
    # All are counted like that, over the larger of the axes that split a row's work.
    ring = 2 * (1 - 1 / max(mesh.shape["model"], mesh.shape.get("slots", 1)))
    return PassCost(
        weights=weights,
        cache=cache,
        flops=flops,
        collectives=collectives,
        memory_seconds=(weights + cache) / chip.bandwidth,
        compute_seconds=flops / chip.flops,
        # The published figure adds up both directions, and a chip sends while it receives.
        interconnect_seconds=ring * moved / (chip.interconnect / 2)
        + collectives * collective_us * 1e-6,
        times=times,
    )
