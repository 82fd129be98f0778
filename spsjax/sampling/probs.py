"""Probabilities from logits.

The vocabulary is never sorted, because sorting is slow on every backend. Filters search for a
threshold instead, which takes only counts and sums.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.sampling import ordered
from spsjax.sampling.params import RowParams
from spsjax.types import Array
from spsjax.utils import kernel_choice

# Bits of the threshold per step of its search, found with 2**bits - 1 sums in one pass over the
# logits. By the TPU compiler's estimate (v5p:2x2x4, Chinchilla with one layer, K = 4, top-k and
# top-p), sampling and verification take 2.4 million cycles per round with 1 bit, 1.8 with 2 and 1.6
# with 4. On a CPU (V = 4,096), 2 bits take 1.3 times as long as 1, 4 bits 2.9 times, a sort 33
# times. Logits are gathered before sampling: sums over logits that stay split by vocabulary take as
# many cycles, but 313 collectives per round instead of 20.
# A GPU computes all sums of a step in one reduction, because starting a kernel takes longer than
# further sums. A filter is then 37 kernels instead of 175, as XLA compiles it for an H100 (V =
# 49,152, one row).
_BITS = 2
_GPU_BITS = 4


@jax.named_scope("to_probs")
def to_probs(logits: Array, rows: RowParams) -> Array:
    """Returns the probabilities to sample from: [B, ..., V] logits -> [B, ..., V] float32.

    If a logit is not finite, all V probabilities are NaN, so that every verifier reports the row.
    float64 logits give float64 probabilities.
    """
    kernels = kernel_choice.kernels_of("sampling.fused.probs")
    if kernels is None or not kernels.supports(logits):
        return _to_probs(logits, rows)
    return kernel_choice.chosen(kernels.to_probs, _to_probs)(logits, rows)


def _to_probs(logits: Array, rows: RowParams) -> Array:
    """Does what `to_probs` does, in plain XLA."""
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    columns = jax.tree.map(lambda leaf: leaf.reshape(-1, *[1] * (logits.ndim - 1)), rows)
    greedy = columns.temperature == 0
    finite = jnp.all(jnp.isfinite(logits), axis=-1, keepdims=True)
    logits = jnp.where(finite, logits, 0).astype(dtype)
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    # The maximum is subtracted before the division, because a low temperature would overflow.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.where(greedy, 1, columns.temperature).astype(dtype)
    weights = jnp.exp(scaled)

    has_top_k = (columns.top_k > 0) & (columns.top_k < logits.shape[-1])
    used = ~greedy & jnp.stack([has_top_k, columns.top_p < 1])

    def filtered(index, weights):
        def search():
            is_top_k = index == 0
            mass = columns.top_p.astype(dtype) * jnp.sum(weights, axis=-1, keepdims=True)
            needed = jnp.where(is_top_k, columns.top_k.astype(dtype), mass)
            counted = jnp.where(is_top_k, jnp.ones_like(weights), weights)
            keep = _keep_top_mass(logits, counted, needed)
            return jnp.where(~used[index] | keep, weights, 0)

        # `cond`: a filter that no row uses costs nothing.
        return lax.cond(jnp.any(used[index]), search, lambda: weights)

    # Top-k, then top-p. They are two rounds of a loop, because the search takes long to compile.
    weights = lax.fori_loop(0, 2, filtered, weights)
    # The largest weight is exp(0) = 1, so min_p compares with the weights directly.
    weights = jnp.where(weights >= columns.min_p.astype(dtype), weights, 0)
    probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
    probs = jnp.where(greedy, jnp.arange(logits.shape[-1]) == best, probs)
    return jnp.where(finite, probs, jnp.nan)


def _keep_top_mass(logits: Array, weights: Array, needed: Array) -> Array:
    """Returns bool [..., V]: the smallest set of highest logits whose weights sum to `needed`.

    Ties go to the lower id. `needed` is [..., 1], at most the sum of the weights. The function
    searches for the threshold logit bit by bit. The result is exact: floats have the order of their
    bits (`ordered.integers`), and a masked sum in a fixed order never decreases as the mask
    grows.
    """
    needed = jnp.maximum(needed, jnp.finfo(weights.dtype).tiny)  # a low top_p may underflow to 0
    order = ordered.integers(logits)
    on_gpu = functools.partial(_threshold, bits=_GPU_BITS, sums_above=_all_sums, unroll=True)
    default = functools.partial(_threshold, bits=_BITS, sums_above=_sum_after_sum, unroll=False)
    threshold = lax.platform_dependent(
        order, weights, needed, default=default, cuda=on_gpu, rocm=on_gpu
    )
    # Tokens above the threshold are all kept. Of the tokens that equal it, only as many as needed.
    above, ties = order > threshold, order == threshold
    missing = needed - jnp.sum(jnp.where(above, weights, 0), axis=-1, keepdims=True)
    tied_weight = jnp.max(jnp.where(ties, weights, 0), axis=-1, keepdims=True)
    num_ties = jnp.maximum(
        jnp.ceil(missing / jnp.maximum(tied_weight, jnp.finfo(weights.dtype).tiny)), 1
    )

    def first_ties():
        return ties & (jnp.cumsum(ties, axis=-1) <= num_ties)

    # The cumulative sum is slow and rarely needed: logits of a real model seldom tie.
    surplus = jnp.sum(ties, axis=-1, keepdims=True) > num_ties
    return above | lax.cond(jnp.any(surplus), first_ties, lambda: ties)


def _threshold(
    order: Array, weights: Array, needed: Array, bits: int, sums_above: Callable, unroll: bool
) -> Array:
    """Returns the greatest threshold [..., 1] at which weights from it on sum to `needed`.

    Args:
        order: unsigned integers [..., V] that have a threshold.
        weights: weights [..., V].
        needed: sum [..., 1], at most that of all weights.
        bits: number of bits per step of the search.
        sums_above: function of `order`, `weights` and thresholds that returns sums per threshold.
        unroll: whether the steps are unrolled.
    """
    width = order.dtype.itemsize * 8
    times = range(1, 2**bits)

    def add_bits(i, threshold):
        """Returns the threshold with its next bits, the most significant bits first."""
        unit = jnp.ones((), order.dtype) << (width - bits * (i + 1)).astype(order.dtype)
        # The greatest multiple of `unit` at which the weights above the threshold still suffice.
        sums = sums_above(order, weights, [threshold + count * unit for count in times])
        multiple = sum((total >= needed).astype(order.dtype) for total in sums)
        return threshold + unit * multiple

    start = jnp.zeros_like(order[..., :1])
    return lax.fori_loop(0, width // bits, add_bits, start, unroll=unroll)


def _sum_after_sum(order: Array, weights: Array, thresholds: Sequence[Array]) -> list[Array]:
    """Returns the sums [..., 1] of weights from each threshold on."""
    return [
        jnp.sum(jnp.where(order >= threshold, weights, 0), axis=-1, keepdims=True)
        for threshold in thresholds
    ]


def _all_sums(order: Array, weights: Array, thresholds: Sequence[Array]) -> list[Array]:
    """Does what `_sum_after_sum` does in one reduction."""
    above = order[..., None, :] >= jnp.stack(thresholds, axis=-2)
    sums = jnp.sum(jnp.where(above, weights[..., None, :], 0), axis=-1)
    return jnp.split(sums, len(thresholds), axis=-1)
