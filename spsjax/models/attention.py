"""Attention as pure functions: positions, scores and the weighted sum. No parameters live here."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.parallel import sharding
from spsjax.types import Array


def rope_frequencies(head_dim: int, theta: float, scaling: tuple = ()) -> Array:
    """[C/2] of the rotary embedding (Su et al. 2021, arXiv 2104.09864).

    `scaling` is as in `Config.rope_scaling`: all are divided by a factor; or (Llama 3.1) those of
    wavelengths above `original / low` are, those below `original / high` are not, and what is
    between is interpolated.
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
    """Cosine and sine [B, T, 1, C/2] of the rotary embedding."""
    angles = positions_BT[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHC: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first half of each head against its second half, in float32."""
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)


def relative_positions(slots: int, d_model: int) -> Array:
    """Sinusoids [S, D] of the distances S-1, ..., 0 (Dai et al. 2019, arXiv 1901.02860, 3.3)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model)
    angles = jnp.arange(slots - 1, -1, -1)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def relative_scores(query_BTHC: Array, table_HSC: Array, positions_BT: Array) -> Array:
    """[B, T, H, S] float32: each query against the distance between its position and each slot.

    `table_HSC` are the projected `relative_positions`. Every query meets every distance once, and
    its row of scores is then shifted to where its own position is; slots beyond it get anything.

    A row's positions must lie in [p, p + T) with p its first. So one slice a row does most of the
    shift, and log2(T) selections the rest: a slice a query would be a loop on accelerators.
    """
    T, slots = query_BTHC.shape[1], table_HSC.shape[1]
    scores = jnp.einsum("bthc,hsc->bths", query_BTHC, table_HSC, preferred_element_type=jnp.float32)
    steps = (T - 1).bit_length()
    width = slots + 2**steps - 1
    padded = jnp.pad(scores, [(0, 0)] * 3 + [(0, width)])
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


def capped(x: Array, limit: float) -> Array:
    """Within (-limit, limit), smoothly; as it is where the limit is 0."""
    return limit * jnp.tanh(x / limit) if limit else x


def attend(
    query_BTHC: Array,
    keys_BGSC: Array,
    values_BGSC: Array,
    mask_BTS: Array,
    bias_BTHS: Array | None,
    scale: float,
    softcap: float = 0.0,
) -> Array:
    """Softmax attention: [B, T, H, C]. The softmax is float32; masked slots weigh exactly zero.

    `bias_BTHS` is added to the products of queries and keys before they are scaled, and then capped
    unless `softcap` is 0.
    """
    (B, T, H, C), G = query_BTHC.shape, keys_BGSC.shape[1]
    if G % sharding.model_axis():
        # Heads that the mesh cannot split are on every device: each takes what its queries read.
        keys_BGSC, values_BGSC = (jnp.repeat(x, H // G, axis=1) for x in (keys_BGSC, values_BGSC))
        G = H
    query = query_BTHC.reshape(B, T, G, H // G, C).transpose(0, 2, 1, 3, 4)  # [B, G, T, H/G, C]
    # One query of several heads a key-value head: XLA's batched dot is slow at so few rows on CPUs,
    # and half of the time of a decode step's attention goes if it is a product and a sum instead.
    # With one head a key-value head it is the other way round.
    single = T == 1 and H > G
    if single:
        scores = jnp.sum(query.astype(jnp.float32) * keys_BGSC[:, :, :, None], axis=-1)
        scores = jnp.swapaxes(scores, 2, 3)[:, :, None]
    else:
        query = query.reshape(B, G, -1, C)
        scores = jnp.einsum("bgnc,bgsc->bgns", query, keys_BGSC, preferred_element_type=jnp.float32)
        scores = scores.reshape(B, G, T, H // G, -1)
    if bias_BTHS is not None:
        scores += bias_BTHS.reshape(B, T, G, H // G, -1).swapaxes(1, 2)
    scores = capped(scores * scale, softcap)
    scores = jnp.where(mask_BTS[:, None, :, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    if single:
        mixed = jnp.sum(weights[:, :, 0, :, :, None] * values_BGSC[:, :, None], axis=3)
    else:
        weights = weights.reshape(B, G, -1, weights.shape[-1]).astype(values_BGSC.dtype)
        mixed = jnp.einsum("bgns,bgsc->bgnc", weights, values_BGSC)
    mixed = mixed.astype(values_BGSC.dtype).reshape(B, G, T, H // G, C).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(B, T, H, C)
