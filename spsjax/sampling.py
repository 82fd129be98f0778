"""Sampling: probabilities from logits, and tokens drawn from probabilities.

Only `to_probs` applies temperature, top-k, top-p and min-p, in that order, for target and draft.
Only `draw` draws a token. So an acceptance ratio is computed from the same arrays that tokens were
drawn from.

The vocabulary is never sorted, because sorting is slow on every backend. Filters search for a
threshold instead, which takes only counts and sums.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax.errors import InputError, short_repr
from spsjax.types import Array, pytree_dataclass

# Roles of random numbers. A role is folded into a row's key, so that no number is used twice.
DRAFT, ACCEPT, NEXT = range(3)

GENERATOR = "threefry2x32"

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


@pytree_dataclass
class RowParams:
    """`SamplingParams` as arrays, with one value per row."""

    temperature: Array  # [B] float32; 0: greedy
    top_k: Array  # [B] int32; 0: off
    top_p: Array  # [B] float32
    min_p: Array  # [B] float32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: one value per field, or a sequence with one value per row.

    Attributes:
        temperature: divisor of the logits; 0 takes the most probable token, and the filters below
            then do nothing.
        top_k: number of most probable tokens to keep; 0 keeps all.
        top_p: mass that the smallest set of most probable tokens must reach to be kept
            (Holtzman et al. 2019, arXiv 1904.09751).
        min_p: lowest probability to keep, relative to the most probable token's.

    The filters apply in this order, each to the renormalised result of the previous one. Ties go to
    the lower id, and at least one token is always kept.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float | Sequence[float] = 1.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0

    def __post_init__(self):
        ranges = {
            "temperature": (lambda x: (x >= 0) & (x < 1e38), "a finite number >= 0"),
            "top_k": (lambda x: (x >= 0) & (x < 2**63) & (x == np.floor(x)), "an integer >= 0"),
            "top_p": (lambda x: (x > 0) & (x <= 1), "a number in (0, 1]"),
            "min_p": (lambda x: (x >= 0) & (x <= 1), "a number in [0, 1]"),
        }
        for field, (in_range, expected) in ranges.items():
            value = getattr(self, field)
            try:
                numbers = np.asarray(value)
            except (TypeError, ValueError):
                numbers = np.asarray(None)
            if numbers.ndim > 1 or numbers.dtype.kind not in "iuf" or not np.all(in_range(numbers)):
                raise InputError(f"{field}: expected {expected}, found {short_repr(value)}")

    def of_one_row(self) -> "SamplingParams":
        """Returns the parameters of one row as single values; raises InputError for more rows."""
        self.rows(1)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return SamplingParams(**{name: np.ravel(value)[0].item() for name, value in values.items()})

    def rows(self, batch: int) -> RowParams:
        """Returns NumPy arrays with one value per row; raises InputError for another length."""
        columns: dict[str, Any] = {}
        for field, dtype in (
            ("temperature", np.float32),
            ("top_k", np.int32),
            ("top_p", np.float32),
            ("min_p", np.float32),
        ):
            value = np.asarray(getattr(self, field))
            if value.ndim and value.shape != (batch,):
                raise InputError(
                    f"{field}: expected one value or {batch} (one per row), found {value.size}"
                )
            if dtype == np.int32:
                value = np.minimum(value, np.iinfo(np.int32).max)
            columns[field] = np.broadcast_to(value, (batch,)).astype(dtype)
        # Division by a denormal float32 overflows. A temperature this low is greedy in effect.
        tiny = columns["temperature"] < np.finfo(np.float32).tiny
        columns["temperature"] = np.where(tiny, np.float32(0), columns["temperature"])
        return RowParams(**columns)


def row_keys(key: Array, rows: Array | int) -> Array:
    """Returns one key per row [B], which depends only on `key` and the index of the row.

    The keys are of the threefry generator, whatever `key` is: under `vmap`, other generators give
    every row the numbers of the first row's key.
    """
    if str(jax.random.key_impl(key)) != GENERATOR:
        data = jax.random.bits(key, (2,), jnp.uint32)
        key = jax.random.wrap_key_data(data, impl=GENERATOR)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))


def sample_key(seed: Array, row: Array) -> Array:
    """Returns key `row` of the `row_keys` of a seed, without the others."""
    return jax.random.fold_in(jax.random.key(seed, impl=GENERATOR), row)


def uniforms(keys_B: Array, role: int, count: int) -> Array:
    """Returns [B, count] float32 in [0, 1) for one role; number i does not depend on `count`."""

    def row(key):
        return jax.random.uniform(jax.random.fold_in(key, role), (count,), jnp.float32)

    return jax.vmap(row)(keys_B)


@jax.named_scope("to_probs")
def to_probs(logits: Array, rows: RowParams) -> Array:
    """Returns the probabilities to sample from: [B, ..., V] logits -> [B, ..., V] float32.

    If a logit is not finite, all V probabilities are NaN, so that every verifier reports the row.
    float64 logits give float64 probabilities.
    """
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
    bits (`_as_ordered_integers`), and a masked sum in a fixed order never decreases as the mask
    grows.
    """
    needed = jnp.maximum(needed, jnp.finfo(weights.dtype).tiny)  # a low top_p may underflow to 0
    order = _as_ordered_integers(logits)
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


def _as_ordered_integers(x: Array) -> Array:
    """Returns unsigned integers in the order of the floats; -0.0 and 0.0 become the same."""
    integer = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), integer)
    sign = jnp.ones((), integer) << (integer.dtype.itemsize * 8 - 1)
    # IEEE 754: the bits of positive floats grow with the float, those of negative floats shrink.
    return jnp.where(bits >= sign, ~bits, bits | sign)


@jax.named_scope("draw")
def draw(weights: Array, uniforms: Array) -> Array:
    """Draws a token from unnormalised weights by the inverse CDF: [..., V], [..., 2] -> [...].

    It draws a block of tokens, then a token of that block, with one random number for each. So one
    pass over the vocabulary suffices, and the 23 random bits of a float32 do not limit how rare a
    token can be. Prefix sums are monotone: a token of weight 0 is never drawn unless all are 0.
    """
    vocab = weights.shape[-1]
    width = min(128, vocab)
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, -vocab % width)]
    blocks = jnp.pad(weights, padding).reshape(*weights.shape[:-1], -1, width)
    block = _inverse_cdf(jnp.sum(blocks, axis=-1), uniforms[..., 0])
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * width + _inverse_cdf(inside, uniforms[..., 1])).astype(jnp.int32)


def _inverse_cdf(weights: Array, uniform: Array) -> Array:
    """Returns the first index whose prefix sum exceeds `uniform` x total: [..., N], [...] -> [...].

    Every prefix sum is the same masked sum over the short last axis, so the sums are monotone. A
    parallel `cumsum` adds in another order for each entry, and need not be.
    """
    positions = jnp.arange(weights.shape[-1])
    in_prefix = positions[:, None] >= positions
    ends = jnp.sum(jnp.where(in_prefix, weights[..., None, :], 0), axis=-1)
    level = uniform.astype(weights.dtype)[..., None] * ends[..., -1:]
    # `uniform` x total may round up to the total. Then the last token of positive weight is drawn.
    last = jnp.max(jnp.where(weights > 0, positions, 0), axis=-1)
    return jnp.minimum(jnp.sum(ends <= level, axis=-1), last)
