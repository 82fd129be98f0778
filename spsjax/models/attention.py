"""Attention as pure functions without parameters: positions, scores and the weighted sum."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spsjax.caches import Segment
from spsjax.parallel import sharding
from spsjax.types import Array, PyTree, pytree_dataclass

MANY_QUERIES = 1024  # that attend at once, of a text without a cache


def relative_positions(slots: int, d_model: int) -> Array:
    """Returns sinusoids [S, D] of the distances S-1, ..., 0 (Dai et al. 2019, 1901.02860, 3.3)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model)
    angles = jnp.arange(slots - 1, -1, -1)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def distance_scores(query_BTHC: Array, table_HSC: Array) -> Array:
    """Returns [B, T, H, S] float32: each query against the distances S-1, ..., 0.

    `table_HSC` are the projected `relative_positions`.
    """
    return jnp.einsum("bthc,hsc->bths", query_BTHC, table_HSC, preferred_element_type=jnp.float32)


def scores_of_slots(scores_BTHS: Array, positions_BT: Array) -> Array:
    """Returns [B, T, H, S]: `distance_scores` from the position of each query to each slot.

    Slot i holds position i. Each query's row of scores is shifted to where its own position is;
    slots beyond it get arbitrary values.

    A row's positions must lie in [p, p + T) with p its first. So one slice per row does most of the
    shift, and log2(T) selections the rest: a slice per query would be a loop on accelerators.
    """
    T, slots = scores_BTHS.shape[1], scores_BTHS.shape[3]
    steps = (T - 1).bit_length()
    width = slots + 2**steps - 1
    padded = jnp.pad(scores_BTHS, [(0, 0)] * 3 + [(0, width)])
    first = positions_BT[:, 0]
    starts = jnp.maximum(slots - T - first, 0)
    cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=width, axis=-1)
    scores = jax.vmap(cut)(padded, starts)
    left = slots - 1 - positions_BT - starts[:, None]
    for step in reversed(range(steps)):
        keep = scores.shape[-1] - 2**step
        shift = (left[:, :, None, None] >> step) & 1 == 1
        scores = jnp.where(shift, scores[..., 2**step :], scores[..., :keep])
    return scores


def scores_of_distances(scores_BTHP: Array, distances_BTS: Array) -> Array:
    """Returns [B, T, H, S]: `distance_scores` at any distances.

    For few keys in any order, such as the nodes of a tree, whose positions repeat. A key at a
    distance of P or more gets an arbitrary value.
    """
    nearest = scores_BTHP.shape[3] - 1  # where distance 0 is
    index = jnp.clip(nearest - distances_BTS, 0, nearest)
    return jnp.take_along_axis(scores_BTHP, index[:, :, None], axis=-1)


@pytree_dataclass
class Sinks:
    """Queries for the first tokens of a text, which are seen wherever the window is.

    Attributes:
        query: [B, T, H, C], rotated as if the window followed right after the sinks.
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
    """Attends to several segments under one softmax: [B, T, H, C].

    The softmax is of at least float32, and masked slots weigh exactly zero. A segment's bias is
    added to the products of queries and keys before they are scaled, and then capped unless
    `softcap` is 0. `sinks` are queries of their own for the sinks; None: there are none.

    A segment of fewer than B rows is shared: each of its rows serves B / rows rows of queries.
    """
    if any(segment.split for segment in segments):
        mixed = _attend_apart(query_BTHC, segments, biases_BTHS, scale, softcap, sinks)
    else:
        weights = weights_of(query_BTHC, segments, biases_BTHS, scale, softcap, sinks)
        repeats = _repeats(query_BTHC, segments)
        values = [jnp.repeat(segment.values, repeats, axis=1) for segment in segments]
        mixed = sum(_mix(part, value) for part, value in zip(weights, values))
    mixed = mixed.astype(segments[0].values.dtype).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(query_BTHC.shape)


def in_turn(attended: Callable, *arrays: PyTree) -> Array:
    """Returns `attended(*arrays)` [B, T, H, C], computed for `MANY_QUERIES` of T at a time.

    Of each part the gradient keeps the arrays alone, and computes its scores again: memory grows
    with T, and not with its square.

    Args:
        attended: function of queries, and of what belongs to each; rows of T are independent.
        arrays: pytrees of arrays [B or 1, T, ...], the queries first.
    """
    T = jax.tree.leaves(arrays)[0].shape[1]
    count = -(-T // MANY_QUERIES)

    def parts(array):
        more = [(0, 0), (0, count * MANY_QUERIES - T)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, more, mode="edge")
        shape = len(array), count, MANY_QUERIES, *array.shape[2:]
        return jnp.moveaxis(padded.reshape(shape), 1, 0)

    mixed = lax.map(jax.checkpoint(lambda now: attended(*now)), jax.tree.map(parts, arrays))
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
    """Returns one [B, G, T, H/G, S] per segment, which add up to 1; arguments as of `attend`."""
    repeats = _repeats(query_BTHC, segments)
    scores = [
        _scores(query_BTHC, segment, bias, repeats, scale, softcap, sinks)
        for segment, bias in zip(segments, biases_BTHS, strict=True)
    ]
    # One softmax without a copy of all scores: every segment has its own part of both sums.
    top = lax.stop_gradient(functools.reduce(jnp.maximum, map(_most, scores)))
    weights = [jnp.exp(part - top) for part in scores]
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
    # Divided before they are multiplied with values: the sum over rounded weights would not cancel
    # in the gradient.
    return [part / total for part in weights]


def _scores(
    query_BTHC: Array,
    segment: Segment,
    bias_BTHS: Array | None,
    repeats: int,
    scale: float,
    softcap: float,
    sinks: Sinks | None,
) -> Array:
    """Returns the scores [B, G, T, H/G, S] of a segment, -inf where a slot is not seen."""
    (B, T, H, C), G = query_BTHC.shape, segment.keys.shape[1] * repeats

    def by_group(query_BTHC):
        return query_BTHC.reshape(B, T, G, H // G, C).transpose(0, 2, 1, 3, 4)

    query, keys = by_group(query_BTHC), jnp.repeat(segment.keys, repeats, axis=1)
    if sinks is None or segment.positions is None:
        products = _score(query, keys)
    else:  # both queries in one product, which reads the keys once
        both = _score(jnp.concatenate([query, by_group(sinks.query)], axis=2), keys)
        is_sink = segment.positions[:, None, None, None] < sinks.count
        products = jnp.where(is_sink, both[:, :, T:], both[:, :, :T])
    if bias_BTHS is not None:
        products += bias_BTHS.reshape(B, T, G, H // G, -1).swapaxes(1, 2)
    products = capped(products * scale, softcap)
    return jnp.where(segment.visible[:, None, :, None], products, -jnp.inf)


def _most(scores: Array) -> Array:
    """Returns the greatest score of each query, -inf if there is none: [..., 1]."""
    return jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)


def _attend_apart(query_BTHC, segments, biases_BTHS, scale, softcap, sinks) -> Array:
    """Attends where devices hold different slots of a segment: [B, G, T, H/G, C].

    Each device makes the softmax of what it holds, and the sums are merged: one collective for a
    split segment, of C + 2 numbers for each query, head and device. The arguments are `attend`'s.
    """
    repeats = _repeats(query_BTHC, segments)

    def summed(query, segment, bias, sinks):
        """Returns [1, B, G, T, H/G, 2 + C]: greatest score, sum of weights, weighted values."""
        scores = _scores(query, segment, bias, repeats, scale, softcap, sinks)
        top = _most(scores)
        weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = _mix(weights, jnp.repeat(segment.values, repeats, axis=1))
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
    share = jnp.exp(top - jnp.max(top, axis=0))
    return jnp.sum(mixed * share, axis=0) / jnp.sum(total * share, axis=0)


def _repeats(query_BTHC: Array, segments: Sequence[Segment]) -> int:
    """Returns how often keys and values are repeated before queries read them.

    Heads that the mesh cannot split are on every device: each takes what its queries read.
    """
    G = segments[0].keys.shape[1]
    return query_BTHC.shape[2] // G if G % sharding.model_axis() else 1


def _score(query: Array, keys_BGSC: Array) -> Array:
    """[B, G, T, H/G, C] queries -> [B, G, T, H/G, S] of at least float32."""
    B, wide = len(query), jnp.promote_types(query.dtype, jnp.float32)
    query = _gathered(query, len(keys_BGSC))

    def summed(query, keys_BGSC):
        scores = jnp.sum(query.astype(wide) * keys_BGSC[:, :, :, None], axis=-1)
        return jnp.swapaxes(scores, 2, 3)[:, :, None]

    def multiplied(query, keys_BGSC):
        def product(rows_BGNC):
            equation = "bgnc,bgsc->bgns"
            return jnp.einsum(equation, rows_BGNC, keys_BGSC, preferred_element_type=wide)

        rows = query.reshape(*query.shape[:2], -1, query.shape[-1])
        return _two_rows(product, rows).reshape(*query.shape[:4], -1)

    product = _product(query, keys_BGSC.dtype, summed, multiplied)
    return _dealt(product(query, keys_BGSC), B)


def _mix(weights: Array, values_BGSC: Array) -> Array:
    """[B, G, T, H/G, S] weights -> [B, G, T, H/G, C] of the same type."""
    B = len(weights)
    weights = _gathered(weights, len(values_BGSC))

    def summed(weights, values_BGSC):
        mixed = jnp.sum(weights[:, :, 0, :, :, None] * values_BGSC[:, :, None], axis=3)
        return mixed[:, :, None]

    def multiplied(weights, values_BGSC):
        def product(rows_BGNS):
            equation, wide = "bgns,bgsc->bgnc", weights.dtype
            return jnp.einsum(equation, rows_BGNS, values_BGSC, preferred_element_type=wide)

        rows = weights.reshape(*weights.shape[:2], -1, weights.shape[-1])
        mixed = _two_rows(product, rows.astype(values_BGSC.dtype))
        return mixed.reshape(*weights.shape[:4], -1)

    product = _product(weights, values_BGSC.dtype, summed, multiplied)
    return _dealt(product(weights, values_BGSC), B)


def _product(x_BGTH: Array, dtype, summed: Callable, multiplied: Callable) -> Callable:
    """Returns that of two ways to multiply with a segment which suits device, type and queries.

    For one query of several heads per key-value head, XLA's batched dot is slow on CPUs in float32:
    a product and a sum take half the time. With one head per key-value head it is the other way
    round, and so it is in bfloat16. On GPUs and TPUs the sum takes several times as long.
    """
    if x_BGTH.shape[2] > 1 or x_BGTH.shape[3] == 1 or dtype == jnp.bfloat16:
        return multiplied
    return functools.partial(lax.platform_dependent, cpu=summed, default=multiplied)


def _two_rows(product: Callable[[Array], Array], rows_BGNX: Array) -> Array:
    """Returns `product(rows)`, on CPUs computed for two equal rows where N is 1, in bfloat16.

    XLA for CPUs (JAX 0.10 and 0.12) takes five to eight times as long for one row as for two.
    """
    if rows_BGNX.shape[2] > 1 or rows_BGNX.dtype != jnp.bfloat16:
        return product(rows_BGNX)

    def twice(rows):
        return product(jnp.repeat(rows, 2, axis=2))[:, :, :1]

    return lax.platform_dependent(rows_BGNX, cpu=twice, default=product)


def _gathered(x: Array, rows: int) -> Array:
    """[B, G, T, ...] -> [rows, G, B/rows * T, ...]: side by side what reads the same segment."""
    B, G, T, *rest = x.shape
    if rows == B:
        return x
    return jnp.swapaxes(x.reshape(rows, B // rows, G, T, *rest), 1, 2).reshape(rows, G, -1, *rest)


def _dealt(x: Array, B: int) -> Array:
    """The inverse of `_gathered`: [rows, G, B/rows * T, ...] -> [B, G, T, ...]."""
    rows, G, _, *rest = x.shape
    if rows == B:
        return x
    x = x.reshape(rows, G, B // rows, -1, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(B, G, -1, *rest)
