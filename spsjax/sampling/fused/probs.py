"""Kernels of `sampling.to_probs`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spsjax.sampling import ordered
from spsjax.sampling.fused import shares
from spsjax.sampling.fused.search import search
from spsjax.sampling.fused.shares import Kernels, Peaks, Share
from spsjax.sampling.params import RowParams
from spsjax.types import Array, pytree_dataclass

supports = shares.supports


@pytree_dataclass
class Kept:
    """Tokens that filters have left, those of the highest logits.

    All kernels compare integers, and so agree on them. Weights may differ by rounding.
    """

    threshold: Array  # [R] uint32: tokens above it are kept (`ordered.integers`)
    # [R] float32: at most as many of the tokens that equal it are kept, those of the lowest ids.
    ties: Array


@pytree_dataclass
class Totals:
    """Sums of each share that depend on what is kept."""

    kept: Kept
    above: Array  # [R, P] float32: sum of the weights above the threshold
    ties: Array  # [R, P] float32: number of tokens that equal it, kept or not


def to_probs(logits: Array, rows: RowParams, interpret: bool = False) -> Array:
    """Does what `probs.to_probs` does."""
    x_RV = logits.reshape(-1, logits.shape[-1])
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(x_RV) // len(leaf)), rows)
    keeps_all = each.top_k >= x_RV.shape[1]
    each = dataclasses.replace(each, top_k=jnp.where(keeps_all, 0, each.top_k))
    greedy = each.temperature == 0
    temperature = jnp.where(greedy, 1, each.temperature)
    run = Kernels(x_RV, temperature, interpret)
    shape = len(x_RV), pl.cdiv(x_RV.shape[1], shares.SIZE)
    numbers: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    counts: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    peaks = run(_peaks, Peaks(numbers, counts, numbers, counts))

    def probs_of(totals: Totals | None) -> Array:
        result = jax.ShapeDtypeStruct(x_RV.shape, jnp.float32)
        return run(_probs, result, peaks, greedy, totals)

    def filtered() -> Array:
        def totals_of(kept: Kept) -> Totals:
            return Totals(kept, *run(_totals, [numbers, numbers], peaks, kept))

        return probs_of(totals_of(_filter(run, peaks, each, totals_of)))

    used = ~greedy & ((each.top_k > 0) | (each.top_p < 1) | (each.min_p > 0))
    return lax.cond(jnp.any(used), filtered, lambda: probs_of(None)).reshape(logits.shape)


def _filter(run: Kernels, peaks: Peaks, each: RowParams, totals_of: Callable) -> Kept:
    """Returns what top-k, then top-p and then min-p leave."""
    best = jnp.max(peaks.best, axis=1)
    everything = Kept(jnp.zeros(best.shape, jnp.uint32), jnp.zeros_like(best))
    is_sampled = each.temperature > 0
    has_top_k = is_sampled & (each.top_k > 0)
    has_top_p = is_sampled & (each.top_p < 1)

    def narrowed(counts: bool, used: Array, needed: Array, before: Kept) -> Kept:
        threshold, above = search(run, peaks, counts, needed)
        weight = jnp.ones_like(best)
        if not counts:
            weight = jnp.exp((ordered.floats(threshold) - best) / run.temperature)
        tiny = jnp.finfo(jnp.float32).tiny
        ties = jnp.maximum(jnp.ceil((needed - above) / jnp.maximum(weight, tiny)), 1)
        # If all but a rounding error is needed, the search may pass what top-k has left.
        is_less = (threshold > before.threshold) | (
            (threshold == before.threshold) & (ties < before.ties)
        )
        found = Kept(threshold, ties)
        return jax.tree.map(lambda new, old: jnp.where(used & is_less, new, old), found, before)

    def by_count() -> Kept:
        return narrowed(True, has_top_k, each.top_k.astype(jnp.float32), everything)

    def by_mass(kept: Kept) -> Kept:
        totals = totals_of(kept)
        weight = jnp.exp((ordered.floats(kept.threshold) - best) / run.temperature)
        ties = jnp.minimum(kept.ties, jnp.sum(totals.ties, axis=1))
        mass = jnp.sum(totals.above, axis=1) + jnp.where(ties > 0, ties * weight, 0)
        needed = jnp.maximum(each.top_p * mass, jnp.finfo(jnp.float32).tiny)
        return narrowed(False, has_top_p, needed, kept)

    kept = lax.cond(jnp.any(has_top_k), by_count, lambda: everything)
    kept = lax.cond(jnp.any(has_top_p), by_mass, lambda kept: kept, kept)
    # The lowest logit whose weight is min-p. It is at most the best one.
    lowest = ordered.integers(best + run.temperature * jnp.log(each.min_p)) - 1
    is_less = (each.min_p > 0) & (lowest >= kept.threshold)
    return Kept(jnp.where(is_less, lowest, kept.threshold), jnp.where(is_less, 0, kept.ties))


def _peaks(x_ref, temperature_ref, peaks: Peaks) -> None:
    share = Share.of(x_ref)
    at, best = (share.row, share.number), jnp.max(share.x)
    peaks.best[at] = best
    peaks.index[at] = jnp.min(jnp.where(share.x == best, share.index, shares.LAST))
    peaks.total[at] = jnp.sum(share.weights(best, temperature_ref[share.row]))
    is_finite = jnp.where(share.exists, jnp.abs(share.x) < jnp.inf, True)
    peaks.finite[at] = jnp.min(is_finite.astype(jnp.int32))


def _totals(x_ref, temperature_ref, peaks, kept, above_ref, ties_ref) -> None:
    share = Share.of(x_ref)
    row = share.row
    order, threshold = ordered.integers(share.x), kept.threshold[row]
    weights = share.weights(share.best_of_row(peaks), temperature_ref[row])
    above_ref[row, share.number] = jnp.sum(jnp.where(order > threshold, weights, 0))
    ties = share.exists & (order == threshold)
    ties_ref[row, share.number] = jnp.sum(ties.astype(jnp.float32))


def _probs(x_ref, temperature_ref, peaks, greedy_ref, totals, probs_ref) -> None:
    share = Share.of(x_ref)
    row, temperature = share.row, temperature_ref[share.row]
    bests = share.of_all(peaks.best, -jnp.inf)
    best = jnp.max(bests)
    weights = share.weights(best, temperature)
    if totals is None:
        total = jnp.sum(share.of_all(peaks.total, 0.0) * jnp.exp((bests - best) / temperature))
    else:
        weights, total = _kept(share, weights, best, temperature, totals)
    first = jnp.min(jnp.where(bests == best, share.of_all(peaks.index, shares.LAST), shares.LAST))
    one_hot = (share.index == first).astype(jnp.float32)
    probs = jnp.where(greedy_ref[row], one_hot, weights / total)
    is_finite = jnp.min(share.of_all(peaks.finite, 1)) > 0
    probs = jnp.where(is_finite, probs, jnp.nan)
    triton.store(probs_ref.at[row, share.index], probs, mask=share.exists)


def _kept(share: Share, weights, best, temperature, totals: Totals) -> tuple[Array, Array]:
    """Returns the weights of kept tokens, 0 for others, and their sum over the row."""
    row = share.row
    threshold, most = totals.kept.threshold[row], totals.kept.ties[row]
    ties = share.of_all(totals.ties, 0.0)
    before = jnp.sum(jnp.where(jnp.arange(len(ties)) < share.number, ties, 0))
    order = ordered.integers(share.x)
    is_tie = share.exists & (order == threshold)
    rank = before + jnp.cumsum(is_tie.astype(jnp.float32))
    keep = (order > threshold) | (is_tie & (rank <= most))
    weights = jnp.where(keep, weights, 0)
    tied = jnp.exp((ordered.floats(threshold) - best) / temperature)
    count = jnp.minimum(most, jnp.sum(ties))
    total = jnp.sum(share.of_all(totals.above, 0.0)) + jnp.where(count > 0, count * tied, 0)
    return weights, total
