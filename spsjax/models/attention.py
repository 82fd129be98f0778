"""Attention without parameters: scores and weighted sums as pure functions."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spsjax.models.caches import Segment
from spsjax.parallel import sharding
from spsjax.types import Array, PyTree, pytree_dataclass
from spsjax.utils import kernel_choice

QUERY_CHUNK = 1024  # queries per chunk when a long text attends to itself without a cache


@pytree_dataclass
class Sinks:
    """Queries for attention sinks: the first tokens of a text, which stay visible outside a window.

    Attributes:
        query: queries [B, T, H, C], rotated as if the window directly followed the sinks.
        count: number of sinks.
    """

    query: Array
    count: int = dataclasses.field(metadata={"static": True})


def capped(x: Array, limit: float) -> Array:
    """Returns limit * tanh(x / limit), or x itself if the limit is 0."""
    return limit * jnp.tanh(x / limit) if limit else x


def attend(
    query_BTHC: Array,
    segments: Sequence[Segment],
    biases_BTHS: Sequence[Array | None],
    scale: float,
    softcap: float = 0.0,
    sinks: Sinks | None = None,
) -> Array:
    """Attends to several segments under one softmax: [B, T, H, V], with V the width of values.

    The softmax is in float32 or float64, and masked slots get a weight of exactly 0. A segment's
    bias is added to the products of queries and keys. Then these are scaled, and capped unless
    `softcap` is 0. `sinks` are separate queries for attention sinks; None: there are none.

    A segment of fewer than B rows is shared: each of its rows serves B / rows rows of queries.
    """

    def plain(query_BTHC, segments):
        return _attend(query_BTHC, segments, biases_BTHS, scale, softcap, sinks)

    kernels = kernel_choice.kernels_of("models.fused.attention")
    is_special = sinks is not None or any(bias is not None for bias in biases_BTHS)
    if kernels is None or is_special or not kernels.supports(query_BTHC, segments):
        return plain(query_BTHC, segments)
    by_kernels = functools.partial(kernels.attend, scale=scale, softcap=softcap)
    return kernel_choice.chosen(by_kernels, plain)(query_BTHC, segments)


def _attend(query_BTHC, segments, biases_BTHS, scale, softcap, sinks) -> Array:
    """Does what `attend` does, in plain XLA, and specifies the kernels."""
    if any(segment.split for segment in segments):
        mixed: Any = _attend_split(query_BTHC, segments, biases_BTHS, scale, softcap, sinks)
    else:
        weights = weights_of(query_BTHC, segments, biases_BTHS, scale, softcap, sinks)
        repeats = _repeats(query_BTHC, segments)
        values = [jnp.repeat(segment.values, repeats, axis=1) for segment in segments]
        mixed = sum(_weighted_sum(*pair) for pair in zip(weights, values))
    mixed = mixed.astype(segments[0].values.dtype).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(*query_BTHC.shape[:3], -1)


def in_chunks(attend_chunk: Callable, *arrays: PyTree) -> Array:
    """Returns `attend_chunk(*arrays)` [B, T, H, C], computed for `QUERY_CHUNK` queries at a time.

    The backward pass computes the scores of a chunk again instead of storing them. So memory grows
    with T, and not with its square.

    Args:
        attend_chunk: function of queries and of arrays that belong to them; queries must be
            independent of each other.
        arrays: pytrees of arrays [B or 1, T, ...], the queries first.
    """
    T = jax.tree.leaves(arrays)[0].shape[1]
    count = -(-T // QUERY_CHUNK)

    def chunks(array):
        padding = [(0, 0), (0, count * QUERY_CHUNK - T)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, padding, mode="edge")
        shape = len(array), count, QUERY_CHUNK, *array.shape[2:]
        return jnp.moveaxis(padded.reshape(shape), 1, 0)

    mixed = lax.map(jax.checkpoint(lambda now: attend_chunk(*now)), jax.tree.map(chunks, arrays))
    mixed = jnp.moveaxis(mixed, 0, 1)
    return mixed.reshape(len(mixed), -1, *mixed.shape[3:])[:, :T]


def weights_of(
    query_BTHC: Array,
    segments: Sequence[Segment],
    biases_BTHS: Sequence[Array | None],
    scale: float,
    softcap: float = 0.0,
    sinks: Sinks | None = None,
) -> list[Array]:
    """Returns the attention weights [B, G, T, H/G, S] of each segment; they sum to 1 over all.

    The arguments are those of `attend`.
    """
    repeats = _repeats(query_BTHC, segments)
    scores = [
        _scores(query_BTHC, segment, bias, repeats, scale, softcap, sinks)
        for segment, bias in zip(segments, biases_BTHS, strict=True)
    ]
    # One softmax over all segments without concatenating their scores: the maximum and the sum of
    # the exponentials are combined. The maximum cancels, so it needs no gradient.
    top = lax.stop_gradient(functools.reduce(jnp.maximum, map(_max_score, scores)))
    weights = [jnp.exp(score - top) for score in scores]
    total = sum(jnp.sum(weight, axis=-1, keepdims=True) for weight in weights)
    # The division comes before the product with the values, which rounds weights to bfloat16. In
    # the other order, the gradients of numerator and denominator would not cancel.
    return [weight / total for weight in weights]


def _scores(
    query_BTHC: Array,
    segment: Segment,
    bias_BTHS: Array | None,
    repeats: int,
    scale: float,
    softcap: float,
    sinks: Sinks | None,
) -> Array:
    """Returns the scores [B, G, T, H/G, S] of a segment; -inf: the slot is not visible."""
    (B, T, H, C), G = query_BTHC.shape, segment.keys.shape[1] * repeats

    def by_group(query_BTHC):
        return query_BTHC.reshape(B, T, G, H // G, C).transpose(0, 2, 1, 3, 4)

    query, keys = by_group(query_BTHC), jnp.repeat(segment.keys, repeats, axis=1)
    if sinks is None or segment.positions is None:
        products = _score(query, keys)
    else:  # one product for both queries reads the keys once
        both = _score(jnp.concatenate([query, by_group(sinks.query)], axis=2), keys)
        is_sink = segment.positions[:, None, None, None] < sinks.count
        products = jnp.where(is_sink, both[:, :, T:], both[:, :, :T])
    if bias_BTHS is not None:
        products += bias_BTHS.reshape(B, T, G, H // G, -1).swapaxes(1, 2)
    products = capped(products * scale, softcap)
    return jnp.where(segment.visible[:, None, :, None], products, -jnp.inf)


def _max_score(scores: Array) -> Array:
    """Returns the greatest score of each query [..., 1]; -inf: no slot is visible."""
    return jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)


def _attend_split(query_BTHC, segments, biases_BTHS, scale, softcap, sinks) -> Array:
    """Attends to segments whose slots are split over devices: [B, G, T, H/G, C].

    Each device computes a softmax over its slots, and the results are merged (flash-decoding). That
    takes one collective per split segment, of C + 2 numbers per query, head and device. The
    arguments are those of `attend`.
    """
    repeats = _repeats(query_BTHC, segments)

    def summed(query, segment, bias, sinks):
        """Returns [1, B, G, T, H/G, 2 + C]: greatest score, sum of weights, weighted values."""
        scores = _scores(query, segment, bias, repeats, scale, softcap, sinks)
        top = _max_score(scores)
        weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))  # no slot: 0, and not NaN
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = _weighted_sum(weights, jnp.repeat(segment.values, repeats, axis=1))
        return jnp.concatenate([top, total, mixed], axis=-1)[None]

    sums, slots = [], P(None, None, "slots")
    for segment, bias in zip(segments, biases_BTHS, strict=True):
        segment, sum_up = dataclasses.replace(segment, distances=None), summed
        if segment.split:
            specs = dataclasses.replace(
                segment, keys=slots, values=slots, visible=slots, positions=P(None, "slots")
            )
            bias_spec = None if bias is None else P(None, None, None, "slots")
            sum_up = jax.shard_map(
                summed,
                in_specs=(P(), specs, bias_spec, None if sinks is None else P()),
                out_specs=P("slots"),
                axis_names={"slots"},
                check_vma=False,
            )
        sums.append(sharding.gather_slots(sum_up(query_BTHC, segment, bias, sinks)))
    top, total, mixed = jnp.split(jnp.concatenate(sums), (1, 2), axis=-1)
    # Rescales each device's sums to the greatest score of all devices.
    share = jnp.exp(top - jnp.max(top, axis=0))
    return jnp.sum(mixed * share, axis=0) / jnp.sum(total * share, axis=0)


def _repeats(query_BTHC: Array, segments: Sequence[Segment]) -> int:
    """Returns how often keys and values are repeated, so that a mesh splits them.

    Key-value heads that the mesh cannot split are replicated. Repeated to a multiple of the model
    axis, they can be split like the query heads, and each device reads its own once.
    """
    G, H, size = segments[0].keys.shape[1], query_BTHC.shape[2], sharding.model_axis()
    repeats = math.lcm(G, size) // G
    # A model of which every device has copies may have other numbers of heads.
    return repeats if H % (G * repeats) == 0 else H // G


def _score(query: Array, keys_BGSC: Array) -> Array:
    """Returns the products of queries [B, G, T, H/G, C] and keys: [B, G, T, H/G, S] float32."""
    B, wide = len(query), jnp.promote_types(query.dtype, jnp.float32)
    query = _group_rows(query, len(keys_BGSC))

    def by_sum(query, keys_BGSC):
        scores = jnp.sum(query.astype(wide) * keys_BGSC[:, :, :, None], axis=-1)
        return jnp.swapaxes(scores, 2, 3)[:, :, None]

    def by_product(query, keys_BGSC):
        def product(rows_BGNC):
            equation = "bgnc,bgsc->bgns"
            return jnp.einsum(equation, rows_BGNC, keys_BGSC, preferred_element_type=wide)

        rows = query.reshape(*query.shape[:2], -1, query.shape[-1])
        return _two_rows(product, rows).reshape(*query.shape[:4], -1)

    product = _faster(query, keys_BGSC.dtype, by_sum, by_product)
    return _ungroup_rows(product(query, keys_BGSC), B)


def _weighted_sum(weights: Array, values_BGSC: Array) -> Array:
    """Returns the sums of values by weights [B, G, T, H/G, S]: [B, G, T, H/G, C]."""
    B = len(weights)
    weights = _group_rows(weights, len(values_BGSC))

    def by_sum(weights, values_BGSC):
        mixed = jnp.sum(weights[:, :, 0, :, :, None] * values_BGSC[:, :, None], axis=3)
        return mixed[:, :, None]

    def by_product(weights, values_BGSC):
        def product(rows_BGNS):
            equation, wide = "bgns,bgsc->bgnc", weights.dtype
            return jnp.einsum(equation, rows_BGNS, values_BGSC, preferred_element_type=wide)

        rows = weights.reshape(*weights.shape[:2], -1, weights.shape[-1])
        mixed = _two_rows(product, rows.astype(values_BGSC.dtype))
        return mixed.reshape(*weights.shape[:4], -1)

    product = _faster(weights, values_BGSC.dtype, by_sum, by_product)
    return _ungroup_rows(product(weights, values_BGSC), B)


def _faster(x_BGTH: Array, dtype, by_sum: Callable, by_product: Callable) -> Callable:
    """Returns the faster one of two ways to multiply with a segment.

    For one query and several query heads per key-value head in float32, XLA's batched dot is slow
    on CPUs, and an elementwise product with a sum takes half the time. With one query head per
    key-value head, or in bfloat16, the dot is faster. On GPUs and TPUs the sum takes several times
    as long as the dot.
    """
    if x_BGTH.shape[2] > 1 or x_BGTH.shape[3] == 1 or dtype == jnp.bfloat16:
        return by_product
    return functools.partial(lax.platform_dependent, cpu=by_sum, default=by_product)


def _two_rows(product: Callable[[Array], Array], rows_BGNX: Array) -> Array:
    """Returns `product(rows)`; on CPUs one row of bfloat16 is computed as two equal rows.

    XLA for CPUs (JAX 0.10 and 0.12) takes five to eight times as long for one row as for two.
    """
    if rows_BGNX.shape[2] > 1 or rows_BGNX.dtype != jnp.bfloat16:
        return product(rows_BGNX)

    def twice(rows):
        return product(jnp.repeat(rows, 2, axis=2))[:, :, :1]

    return lax.platform_dependent(rows_BGNX, cpu=twice, default=product)


def _group_rows(x: Array, rows: int) -> Array:
    """Merges rows of queries that share a segment: [B, G, T, ...] -> [rows, G, B/rows * T, ...]."""
    B, G, T, *dims = x.shape
    if rows == B:
        return x
    return jnp.swapaxes(x.reshape(rows, B // rows, G, T, *dims), 1, 2).reshape(rows, G, -1, *dims)


def _ungroup_rows(x: Array, B: int) -> Array:
    """Inverts `_group_rows`: [rows, G, B/rows * T, ...] -> [B, G, T, ...]."""
    rows, G, _, *dims = x.shape
    if rows == B:
        return x
    x = x.reshape(rows, G, B // rows, -1, *dims)
    return jnp.swapaxes(x, 1, 2).reshape(B, G, -1, *dims)
