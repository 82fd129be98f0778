"""Relative positions of Transformer-XL (Dai et al. 2019, arXiv 1901.02860)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.types import Array


def relative_positions(slots: int, d_model: int) -> Array:
    """Returns sinusoids [S, D] of the distances S-1, ..., 0 (Dai et al. 2019, 1901.02860, 3.3)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model)
    angles = jnp.arange(slots - 1, -1, -1)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def distance_scores(query_BTHC: Array, table_HSC: Array) -> Array:
    """Returns the scores [B, T, H, S] float32 of each query for the distances S-1, ..., 0.

    `table_HSC` are the projected `relative_positions`.
    """
    return jnp.einsum("bthc,hsc->bths", query_BTHC, table_HSC, preferred_element_type=jnp.float32)


def scores_of_slots(scores_BTHS: Array, positions_BT: Array) -> Array:
    """Returns `distance_scores` [B, T, H, S] from the position of each query to each slot.

    Slot i holds position i. Each query's row of scores is shifted by its position; slots beyond the
    position get arbitrary values (Dai et al. 2019, appendix B).

    The positions of a row must lie in [p, p + T), where p is the first. So one slice per row does
    most of the shift, and log2(T) selections do the rest. A slice per query would be a loop on
    accelerators.
    """
    T, slots = scores_BTHS.shape[1], scores_BTHS.shape[3]
    steps = (T - 1).bit_length()
    width = slots + 2**steps - 1
    padded = jnp.pad(scores_BTHS, [(0, 0)] * 3 + [(0, width)])
    first = positions_BT[:, 0]
    starts = jnp.maximum(slots - T - first, 0)
    cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=width, axis=-1)
    scores = jax.vmap(cut)(padded, starts)
    # The remaining shift of each query is below 2**steps, and is done bit by bit.
    shifts_BT = slots - 1 - positions_BT - starts[:, None]
    for step in reversed(range(steps)):
        width = scores.shape[-1] - 2**step
        is_shifted = (shifts_BT[:, :, None, None] >> step) & 1 == 1
        scores = jnp.where(is_shifted, scores[..., 2**step :], scores[..., :width])
    return scores


def scores_of_distances(scores_BTHP: Array, distances_BTS: Array) -> Array:
    """Returns `distance_scores` [B, T, H, S] at arbitrary distances.

    It suits a few keys in any order, such as the nodes of a tree, whose positions repeat. A key at
    a distance of P or more gets an arbitrary value.
    """
    nearest = scores_BTHP.shape[3] - 1  # index of distance 0
    index = jnp.clip(nearest - distances_BTS, 0, nearest)
    return jnp.take_along_axis(scores_BTHP, index[:, :, None], axis=-1)
