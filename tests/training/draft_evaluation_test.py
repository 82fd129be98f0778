"""Tests of draft evaluation: the expected acceptance rate is what drafting counts."""

import functools

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

from spsjax.data import pipeline
from spsjax.parallel import sharding
from spsjax.training import distillation, draft_evaluation, metrics
from spsjax.training import step as train_step
from spsjax.training.draft_evaluation import DraftEvalConfig

FLOAT32 = train_step.Precision("float32")
OPTIONS = DraftEvalConfig(prompts=64, prompt_length=4, new_tokens=48)
PROMPTS = np.random.default_rng(0).integers(0, 32, (64, 4)).tolist()


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    with drafting.small_programs():
        yield


@pytest.fixture(scope="module")
def pair():
    """A target and a draft near it."""
    target = numpy_spread_model(32)
    return target, numpy_nearby_model(target, distance=0.1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def metrics_at(config, target_config, temperature, params, frozen, batch):
    metrics_of = distillation.distillation_metrics(
        config, target_config, distillation.Objective("forward_kl"), FLOAT32, temperature
    )
    return metrics_of(params, frozen, batch)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_counted_acceptance_is_the_expected_one(pair, temperature):
    target, draft = pair
    result = draft_evaluation.sample_with_draft(target, draft, PROMPTS, OPTIONS, temperature, 0)
    assert result.samples.shape == (64, 52)
    metrics_of = functools.partial(metrics_at, draft.config, target.config, temperature or 1.0)
    table = pipeline.Table(tokens=result.samples, start=np.full(64, 4, np.int32))
    summaries = metrics.evaluate_batches(
        metrics_of, draft.params, target.params, table, 64, sharding.batch_sharding(None)
    )
    expected = summaries["acceptance" if temperature else "greedy_agreement"]
    # The margin of 0.04 is there because the positions that rounds decide on are no fair sample.
    counted = result.counted_acceptance
    assert counted == pytest.approx(expected.mean, abs=expected.interval + 0.04)
    independent = (1 - counted**5) / (1 - counted)
    assert result.block_efficiency == pytest.approx(independent, rel=0.1)


def test_greedy_samples_do_not_depend_on_the_draft(pair):
    target, draft = pair
    one, other = (
        draft_evaluation.sample_with_draft(target, each, PROMPTS, OPTIONS, 0.0, 0)
        for each in (draft, numpy_nearby_model(target, seed=2))
    )
    assert np.array_equal(one.samples, other.samples)
    assert one.samples[:, :4].tolist() == PROMPTS
    assert one.counted_acceptance != other.counted_acceptance
