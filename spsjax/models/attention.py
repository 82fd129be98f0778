"""Attention as pure functions without parameters: positions, scores and the weighted sum."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.cache import Segment
from spsjax.parallel import sharding
from spsjax.types import Array


def rope_frequencies(head_dim: int, theta: float, scaling: tuple = ()) -> Array:
    """Returns the [C/2] frequencies of the rotary embedding (Su et al. 2021, arXiv 2104.09864).

    `scaling` is `Config.rope_scaling`. "linear" divides all frequencies by a factor. "llama3"
    divides those of wavelengths above `original / low`, leaves those below `original / high`, and
    interpolates between the two.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if not scaling:
        return frequencies
    kind, factor, *limits = scaling
    if kind == "linear":
        return frequencies / factor
    low, high, original = limits
    turns = original * frequencies / (2 * jnp.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rope_angles(positions_BT: Array, frequencies: Array) -> tuple[Array, Array]:
    """Returns cosine and sine [B, T, 1, C/2] of the rotary embedding."""
    angles = positions_BT[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHC: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first half of each head against its second half, in float32 or float64."""
    wide = jnp.promote_types(x_BTHC.dtype, jnp.float32)
    first, second = jnp.split(x_BTHC.astype(wide), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)


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


def scores_of_keys(scores_BTHP: Array, positions_BT: Array, key_positions_BP: Array) -> Array:
    """Returns [B, T, H, P]: `distance_scores` to each key, wherever it is.

    For the few nodes of a tree, whose positions repeat. A key at a distance of P or more gets an
    arbitrary value.
    """
    nearest = scores_BTHP.shape[3] - 1  # where distance 0 is
    distances = positions_BT[:, :, None] - key_positions_BP[:, None]
    index = jnp.clip(nearest - distances, 0, nearest)
    return jnp.take_along_axis(scores_BTHP, index[:, :, None], axis=-1)


def capped(x: Array, limit: float) -> Array:
    """Returns limit * tanh(x / limit), or x itself if the limit is 0."""
    return limit * jnp.tanh(x / limit) if limit else x


def attend(
    query_BTHC: Array,
    segments: Sequence[Segment],
    biases_BTHS: Sequence[Array | None],
    scale: float,
    softcap: float = 0.0,
) -> Array:
    """Attends to several segments under one softmax: [B, T, H, C].

    The softmax is of at least float32, and masked slots weigh exactly zero. A segment's bias is
    added to the products of queries and keys before they are scaled, and then capped unless
    `softcap` is 0.

    A segment of fewer than B rows is shared: each of its rows serves B / rows rows of queries.
    """
    (B, T, H, C), G = query_BTHC.shape, segments[0].keys.shape[1]
    # Heads that the mesh cannot split are on every device: each takes what its queries read.
    repeats = H // G if G % sharding.model_axis() else 1
    G *= repeats
    query = query_BTHC.reshape(B, T, G, H // G, C).transpose(0, 2, 1, 3, 4)  # [B, G, T, H/G, C]
    scores, values = [], []
    for segment, bias_BTHS in zip(segments, biases_BTHS, strict=True):
        products = _score(query, jnp.repeat(segment.keys, repeats, axis=1))
        if bias_BTHS is not None:
            products += bias_BTHS.reshape(B, T, G, H // G, -1).swapaxes(1, 2)
        products = capped(products * scale, softcap)
        scores.append(jnp.where(segment.visible[:, None, :, None], products, -jnp.inf))
        values.append(jnp.repeat(segment.values, repeats, axis=1))
    # One softmax without a copy of all scores: every segment has its own part of both sums.
    most = functools.partial(jnp.max, axis=-1, keepdims=True, initial=-jnp.inf)
    top = lax.stop_gradient(functools.reduce(jnp.maximum, map(most, scores)))
    weights = [jnp.exp(part - top) for part in scores]
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
    # Divided first: the sum over rounded weights would not cancel in the gradient.
    mixed = sum(_mix(part / total, value) for part, value in zip(weights, values))
    mixed = mixed.astype(values[0].dtype).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(B, T, H, C)


def _score(query: Array, keys_BGSC: Array) -> Array:
    """[B, G, T, H/G, C] queries -> [B, G, T, H/G, S] of at least float32."""
    B, wide = len(query), jnp.promote_types(query.dtype, jnp.float32)
    query = _gathered(query, len(keys_BGSC))

    def summed(query, keys_BGSC):
        scores = jnp.sum(query.astype(wide) * keys_BGSC[:, :, :, None], axis=-1)
        return jnp.swapaxes(scores, 2, 3)[:, :, None]

    def multiplied(query, keys_BGSC):
        scores = jnp.einsum(
            "bgnc,bgsc->bgns",
            query.reshape(*query.shape[:2], -1, query.shape[-1]),
            keys_BGSC,
            preferred_element_type=wide,
        )
        return scores.reshape(*query.shape[:4], -1)

    return _dealt(_product(query, summed, multiplied)(query, keys_BGSC), B)


def _mix(weights: Array, values_BGSC: Array) -> Array:
    """[B, G, T, H/G, S] weights -> [B, G, T, H/G, C] of the same type."""
    B = len(weights)
    weights = _gathered(weights, len(values_BGSC))

    def summed(weights, values_BGSC):
        mixed = jnp.sum(weights[:, :, 0, :, :, None] * values_BGSC[:, :, None], axis=3)
        return mixed[:, :, None]

    def multiplied(weights, values_BGSC):
        mixed = jnp.einsum(
            "bgns,bgsc->bgnc",
            weights.reshape(*weights.shape[:2], -1, weights.shape[-1]).astype(values_BGSC.dtype),
            values_BGSC,
            preferred_element_type=weights.dtype,
        )
        return mixed.reshape(*weights.shape[:4], -1)

    return _dealt(_product(weights, summed, multiplied)(weights, values_BGSC), B)


def _product(x_BGTH: Array, summed: Callable, multiplied: Callable) -> Callable:
    """Returns that of two ways to multiply with a segment which suits device and queries.

    For one query of several heads per key-value head, XLA's batched dot is slow on CPUs: a product
    and a sum take half the time. With one head per key-value head it is the other way round. On
    GPUs the sum takes several times as long as the dot.
    """
    if x_BGTH.shape[2] > 1 or x_BGTH.shape[3] == 1:
        return multiplied
    return functools.partial(
        lax.platform_dependent, default=summed, cuda=multiplied, rocm=multiplied
    )


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
