"""Search for the threshold of a filter, some bits per kernel."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spsjax.sampling import ordered
from spsjax.sampling.fused.shares import Kernels, Peaks, Share
from spsjax.types import Array, pytree_dataclass
from spsjax.utils.powers import power

_BITS = 4  # bits of a threshold per step
_NUMBERS = 2**_BITS


@pytree_dataclass
class Search:
    """State of the search for a threshold, whose highest bits are known."""

    threshold: Array  # [R] uint32: these bits, followed by zeros
    above: Array  # [R] float32: sum above all thresholds that have these bits
    # Sums of each share from threshold + n units on, where a unit is the last one of the next bits.
    sums: Array  # [R, P, N] float32


def search(run: Kernels, peaks: Peaks, counts: bool, needed: Array) -> tuple[Array, Array]:
    """Returns the greatest threshold [R] from which on there is enough, and the sum [R] above it.

    Args:
        run, peaks: the rows.
        counts: whether tokens are counted, and not their weights summed.
        needed: the least sum [R] from the threshold on.
    """
    nothing = jnp.zeros(peaks.best.shape[:1], jnp.float32)
    sums = jnp.zeros((*peaks.best.shape, _NUMBERS), jnp.float32)
    start = Search(nothing.astype(jnp.uint32), nothing, sums)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), start)
    # No bits are known before the first step: its unit before is 0.
    units = jnp.asarray([0, *(1 << shift for shift in range(32 - _BITS, -1, -_BITS))], jnp.uint32)

    def step(number: Array, state: Search) -> Search:
        both = lax.dynamic_slice_in_dim(units, number, 2)
        return run(functools.partial(_step, counts), shapes, peaks, needed, both, state)

    found = lax.fori_loop(0, 32 // _BITS, step, start, unroll=not run.interpret)
    narrow = jax.vmap(functools.partial(_narrowed, units[-1]))
    return narrow(jnp.sum(found.sums, axis=1), found.threshold, found.above, needed)


def _narrowed(
    unit: Array, sums: Array, threshold: Array, above: Array, needed: Array
) -> tuple[Array, Array]:
    """Returns the threshold with the bits of a step, and the sum above all that have them.

    Args:
        unit: unit of these bits.
        sums: sums [N] from threshold + n units on.
        threshold, above: state of the search before the step.
        needed: the least sum from the threshold on.
    """
    number = jnp.arange(_NUMBERS, dtype=jnp.int32)
    # Sums never increase with the number, so this counts the multiples up to the wanted one.
    multiple = jnp.sum((number > 0) & (sums >= needed), dtype=jnp.int32)
    following = jnp.sum(jnp.where(number == multiple + 1, sums, 0))
    above = jnp.where(multiple == _NUMBERS - 1, above, following)
    return threshold + multiple.astype(jnp.uint32) * unit, above


def _step(
    counts: bool, x_ref, temperature_ref, peaks, needed_ref, units_ref, before, after
) -> None:
    """Finds the sums of a step, after the bits of the step before it."""
    share = Share.of(x_ref)
    row, number = share.row, jnp.arange(_NUMBERS, dtype=jnp.int32)
    shares = jnp.arange(power(before.sums.shape[1]))[:, None]
    at = before.sums.at[row, shares, number[None]]
    mask = (shares < before.sums.shape[1]) & (number >= 0)[None]
    sums = jnp.sum(triton.load(at, mask=mask, other=0.0), axis=0)
    state = before.threshold[row], before.above[row], needed_ref[row]
    threshold, above = _narrowed(units_ref[0], sums, *state)
    if counts:
        counted = share.exists.astype(jnp.float32)
    else:
        counted = share.weights(share.best_of_row(peaks), temperature_ref[row])
    order, sums = ordered.integers(share.x), jnp.zeros(_NUMBERS, jnp.float32)
    for multiple in range(1, _NUMBERS):
        limit = threshold + jnp.uint32(multiple) * units_ref[1]
        total = jnp.sum(jnp.where(order >= limit, counted, 0))
        sums = jnp.where(number == multiple, total, sums)
    triton.store(after.sums.at[row, share.number, number], sums)

    @pl.when(share.number == 0)
    def _():
        after.threshold[row] = threshold
        after.above[row] = above
