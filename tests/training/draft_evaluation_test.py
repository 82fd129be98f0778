"""Tests of draft evaluation: the expected acceptance rate is what drafting counts."""

import jax
import numpy as np
import pytest
from helpers.models import nearby_model, spread_model

from spsjax import InputError
from spsjax.data import pipeline
from spsjax.parallel import sharding
from spsjax.training import distillation, draft_evaluation, metrics
from spsjax.training import step as train_step
from spsjax.training.draft_evaluation import DraftEvalConfig

FLOAT32 = train_step.Precision("float32")


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_counted_acceptance_is_the_expected_one(temperature):
    target = spread_model(32)
    draft = nearby_model(target, distance=0.1)
    options = DraftEvalConfig(prompts=64, prompt_length=4, new_tokens=48)
    prompts = np.random.default_rng(0).integers(0, 32, (64, 4)).tolist()
    result = draft_evaluation.sample_with_draft(target, draft, prompts, options, temperature, 0)
    assert result.samples.shape == (64, 52)
    metrics_of = distillation.distillation_metrics(
        draft.config,
        target.config,
        distillation.Objective("forward_kl"),
        FLOAT32,
        temperature or 1.0,
    )
    table = pipeline.Table(tokens=result.samples, start=np.full(64, 4, np.int32))
    summaries = metrics.evaluate_batches(
        jax.jit(metrics_of), draft.params, target.params, table, 64, sharding.batch_sharding(None)
    )
    expected = summaries["acceptance" if temperature else "greedy_agreement"]
    # The margin of 0.04 is there because the positions that rounds decide on are no fair sample.
    counted = result.counted_acceptance
    assert counted == pytest.approx(expected.mean, abs=expected.interval + 0.04)
    independent = (1 - counted**5) / (1 - counted)
    assert result.block_efficiency == pytest.approx(independent, rel=0.1)


def test_greedy_samples_do_not_depend_on_the_draft():
    target = spread_model(32)
    options = DraftEvalConfig(prompts=2, prompt_length=3, new_tokens=24)
    prompts = [[1, 2, 3], [4, 5, 6]]
    one, other = (
        draft_evaluation.sample_with_draft(
            target, nearby_model(target, seed), prompts, options, 0.0, 0
        )
        for seed in (1, 2)
    )
    assert np.array_equal(one.samples, other.samples)
    assert one.samples[:, :3].tolist() == prompts


@pytest.mark.parametrize("temperatures", [None, 1.5, ("a",), (-1.0,), (float("nan"),)])
def test_invalid_temperatures_are_refused(temperatures):
    with pytest.raises(InputError, match=r"^draft_eval.temperatures: expected "):
        DraftEvalConfig(temperatures=temperatures)


@pytest.mark.parametrize(
    "field", ["prompts", "prompt_length", "new_tokens", "num_speculative_tokens"]
)
def test_invalid_count_is_refused(field):
    with pytest.raises(InputError, match=rf"^draft_eval.{field}: expected an integer >= 1, found"):
        DraftEvalConfig(**{field: 0})
