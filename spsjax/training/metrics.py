"""Metrics over held-out examples: means with confidence intervals, and their course by position."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from spsjax.data import pipeline
from spsjax.errors import InputError
from spsjax.parallel import multihost
from spsjax.training import step as train_step
from spsjax.types import PyTree

_NORMAL_95 = 1.96  # 97.5% quantile of the standard normal distribution


@dataclasses.dataclass(frozen=True)
class MetricSummary:
    """Summary of one metric over a set of texts.

    Attributes:
        mean: mean over all positions that count.
        interval: half the width of a 95% confidence interval of the mean, or None for a single
            text. Positions of a text depend on each other, so that a text counts as one sample.
            Texts count as independent, which examples of one document are not quite.
        by_position: means over the texts, one per equal stretch of positions (at most 16).
    """

    mean: float
    interval: float | None
    by_position: list[float]


def summarize(values_NT: np.ndarray, mask_NT: np.ndarray, stretches: int = 16) -> MetricSummary:
    """Summarizes values [N, T] at the positions where the mask [N, T] is 1.

    Raises InputError if it is 0 everywhere.
    """
    mask_NT = np.asarray(mask_NT, np.float64)
    sums, counts = (values_NT * mask_NT).sum(1), mask_NT.sum(1)
    if not counts.any():
        raise InputError(
            "eval_examples: expected examples with tokens that count, found none. Use more of them"
        )
    mean = sums.sum() / counts.sum()
    # The mean is a ratio of two sums over texts. By the delta method, its standard error follows
    # from the spread of the residuals per text.
    residuals = sums - mean * counts
    spread = np.sqrt((residuals**2).sum() * len(sums) / max(1, len(sums) - 1)) / counts.sum()
    used = np.flatnonzero(mask_NT.any(0))
    by_position = [
        float((values_NT[:, columns] * mask_NT[:, columns]).sum() / mask_NT[:, columns].sum())
        for columns in np.array_split(used, min(stretches, len(used)))
    ]
    interval = float(_NORMAL_95 * spread) if len(sums) > 1 else None
    return MetricSummary(float(mean), interval, by_position)


def with_interval(mean: float, interval: float | None, digits: int) -> str:
    """Returns a mean and half the width of its interval as text, a dash for None."""
    return f"{mean:.{digits}f} ± " + ("-" if interval is None else f"{interval:.{digits}f}")


def evenly_spaced(count: int, available: int) -> np.ndarray:
    """Returns indices of at most `count` of the available examples, evenly spaced."""
    count = min(count, available)
    return np.arange(count) * available // count


def evaluate_batches(
    metrics_of: Callable,
    params: PyTree,
    frozen: PyTree,
    table: pipeline.Table,
    batch: int,
    batch_sharding: jax.sharding.Sharding,
) -> dict[str, MetricSummary]:
    """Evaluates all rows of a table in batches and summarizes every metric.

    `metrics_of` is a jitted `step.PerTokenMetrics`.
    """
    values, masks = {}, []
    local = pipeline.local_rows(batch_sharding, batch)
    for start in range(0, len(table), batch):
        # The last batch is filled up with its last row, which counts only once.
        rows = np.minimum(np.arange(start, start + batch), len(table) - 1)
        count = min(batch, len(table) - start)
        examples = pipeline.global_batch(table[rows[local]], batch, batch_sharding)
        metrics, mask = multihost.to_host((metrics_of(params, frozen, examples), _mask(examples)))
        for name, value in metrics.items():
            values.setdefault(name, []).append(value[:count])
        masks.append(mask[:count])
    mask = np.concatenate(masks)
    return {name: summarize(np.concatenate(chunks), mask) for name, chunks in values.items()}


_mask = jax.jit(train_step.loss_mask)
