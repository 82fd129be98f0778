"""Tests of metric summaries over held-out examples."""

import jax
import numpy as np
import pytest
from helpers.toy_language import HELD_OUT
from scipy import stats

from spsjax.data import pipeline
from spsjax.parallel import sharding
from spsjax.training import metrics


def test_summary_averages_positions_and_spreads_over_texts():
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(50, 32)), rng.random((50, 32)) < 0.7
    summary = metrics.summarize(values, mask)
    assert summary.mean == pytest.approx(values[mask].mean())
    third = values[:, 4:6][mask[:, 4:6]].mean()  # the third of 16 stretches
    assert len(summary.by_position) == 16 and summary.by_position[2] == pytest.approx(third)
    full = metrics.summarize(values, np.ones_like(values))
    standard_error = values.mean(1).std(ddof=1) / np.sqrt(50)
    assert full.interval == pytest.approx(1.96 * standard_error)


def test_summary_interval_covers_the_mean_as_often_as_claimed():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(400):
        shared = rng.normal(size=(40, 1))  # what the positions of one text have in common
        mask = np.arange(20) < rng.integers(5, 20, (40, 1))
        summary = metrics.summarize(shared + rng.normal(size=(40, 20)), mask)
        hits += abs(summary.mean) < summary.interval
    assert stats.binomtest(hits, 400, 0.94).pvalue > 1e-3


@pytest.mark.parametrize(("count", "shown"), [(1, "1.00 ± -"), (2, "1.00 ± 0.00")])
def test_interval_of_equal_texts_is_zero_and_of_one_is_none(count, shown):
    summary = metrics.summarize(np.ones((count, 8)), np.ones((count, 8)))
    assert metrics.with_interval(summary.mean, summary.interval, 2) == shown
    assert (summary.interval is None) == (count == 1)


@pytest.mark.parametrize(
    ("count", "available", "expected"), [(4, 8, [0, 2, 4, 6]), (3, 10, [0, 3, 6]), (5, 2, [0, 1])]
)
def test_evenly_spaced_rows_cover_the_whole_text(count, available, expected):
    assert metrics.evenly_spaced(count, available).tolist() == expected


@jax.jit
def metrics_of(params, frozen, batch):
    """Returns two numbers per position, of which one depends on both arguments."""
    tokens = batch["tokens"][:, 1:] * params
    return {"sum": tokens + frozen, "product": tokens * frozen}


@pytest.mark.parametrize(("batch", "shape"), [(16, None), (5, None), (1, None), (6, (2, 1))])
def test_evaluation_counts_each_example_once(batch, shape):
    """Neither the batch size nor the mesh changes the means, which NumPy computes, too."""
    start = np.arange(16, dtype=np.int32)
    table = pipeline.Table(tokens=HELD_OUT, start=start)  # 16 rows
    where = sharding.batch_sharding(sharding.mesh(*shape) if shape else None)
    numbers = np.float32(0.5), np.float32(3.0)
    summaries = metrics.evaluate_batches(metrics_of, *numbers, table, batch, where)
    tokens = HELD_OUT[:, 1:] / 2
    counted = np.arange(1, 17) >= start[:, None]
    assert summaries["sum"].mean == pytest.approx((tokens + 3)[counted].mean(), abs=1e-6)
    assert summaries["product"].mean == pytest.approx((tokens * 3)[counted].mean(), abs=1e-6)
    assert len(summaries["sum"].by_position) == 16
