"""Tests of metric summaries over held-out examples."""

import jax
import numpy as np
import pytest
from helpers.toy_language import CONFIG, HELD_OUT
from scipy import stats

from spsjax.data import pipeline
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import distillation, metrics
from spsjax.training import step as train_step

FLOAT32 = train_step.Precision("float32")


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


def test_summary_of_one_text_has_no_interval():
    summary = metrics.summarize(np.ones((1, 8)), np.ones((1, 8)))
    assert summary.interval is None
    assert metrics.with_interval(summary.mean, summary.interval, 2) == "1.00 ± -"


def test_interval_of_equal_texts_is_zero():
    summary = metrics.summarize(np.ones((2, 8)), np.ones((2, 8)))
    assert metrics.with_interval(summary.mean, summary.interval, 2) == "1.00 ± 0.00"


@pytest.mark.parametrize(
    ("count", "available", "expected"), [(4, 8, [0, 2, 4, 6]), (3, 10, [0, 3, 6]), (5, 2, [0, 1])]
)
def test_evenly_spaced_rows_cover_the_whole_text(count, available, expected):
    assert metrics.evenly_spaced(count, available).tolist() == expected


@pytest.mark.parametrize(("batch", "shape"), [(16, None), (5, None), (1, None), (6, (2, 1))])
def test_evaluation_counts_each_example_once(batch, shape):
    """Neither the batch size nor the mesh changes the acceptance, which NumPy computes, too."""
    params = [transformer.init(CONFIG, jax.random.key(seed)) for seed in (0, 1)]
    objective = distillation.Objective("forward_kl")
    metrics_of = distillation.distillation_metrics(CONFIG, CONFIG, objective, FLOAT32)
    logits = [train_step.forward(CONFIG, weights, HELD_OUT[:, :-1]).logits for weights in params]
    probs = [np.asarray(jax.nn.softmax(array), np.float64) for array in logits]
    summaries = metrics.evaluate_batches(
        jax.jit(metrics_of),
        *params,
        pipeline.Table(tokens=HELD_OUT),  # 16 rows
        batch,
        sharding.batch_sharding(sharding.mesh(*shape) if shape else None),
    )
    expected = np.minimum(*probs).sum(-1).mean()
    assert summaries["acceptance"].mean == pytest.approx(expected, abs=1e-6)
    assert len(summaries["acceptance"].by_position) == 16
