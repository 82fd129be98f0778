"""Acceptance as an expectation is what NumPy gives, and what drafting counts."""

import jax
import numpy as np
import pytest
from conftest import nearby_model, spread_model
from scipy import stats
from toy import CONFIG, HELD_OUT

from spsjax import InputError
from spsjax.data import pipeline
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import distillation, metrics
from spsjax.training import step as train_step

FLOAT32 = train_step.Compute("float32")


def test_means_are_over_positions_and_intervals_over_texts():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(50, 32)), rng.random((50, 32)) < 0.7
    found = metrics.means(values, weights)
    assert found.mean == pytest.approx(values[weights].mean())
    stretch = values[:, 4:6][weights[:, 4:6]].mean()  # the third of 16
    assert len(found.by_position) == 16 and found.by_position[2] == pytest.approx(stretch)
    full = metrics.means(values, np.ones_like(values))
    spread = values.mean(1).std(ddof=1) / np.sqrt(50)
    assert full.interval == pytest.approx(1.96 * spread)


def test_an_interval_holds_the_truth_as_often_as_it_says():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(400):
        texts = rng.normal(size=(40, 1))  # what the positions of a text have in common
        weights = np.arange(20) < rng.integers(5, 20, (40, 1))
        found = metrics.means(texts + rng.normal(size=(40, 20)), weights)
        hits += abs(found.mean) < found.interval
    assert stats.binomtest(hits, 400, 0.94).pvalue > 1e-3


def test_every_example_counts_once_whatever_the_batch_and_the_mesh():
    params = [transformer.init(CONFIG, jax.random.key(seed)) for seed in (0, 1)]
    how = distillation.Objective("forward_kl")
    values = jax.jit(distillation.values(CONFIG, CONFIG, how, FLOAT32))
    logits = [train_step.forward(CONFIG, each, HELD_OUT[:, :-1]).logits for each in params]
    laws = [np.asarray(jax.nn.softmax(each), np.float64) for each in logits]
    expected = np.minimum(*laws).sum(-1).mean()
    table = pipeline.Table(tokens=HELD_OUT)  # 16 rows
    for batch, mesh in ((16, None), (5, None), (1, None), (6, sharding.mesh(2, 1))):
        place = sharding.batch_sharding(mesh)
        found = metrics.on_examples(values, *params, table, batch, place)
        assert found["acceptance"].mean == pytest.approx(expected, abs=1e-6), batch
        assert len(found["acceptance"].by_position) == 16


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_what_is_counted_is_what_is_expected(temperature):
    target = spread_model(32)
    draft = nearby_model(target, distance=0.1)
    drafting = metrics.Drafting(prompts=64, prompt_length=4, new_tokens=48)
    prompts = np.random.default_rng(0).integers(0, 32, (64, 4)).tolist()
    drafted = metrics.by_sampling(target, draft, prompts, drafting, temperature, 0)
    assert drafted.samples.shape == (64, 52)
    values = jax.jit(
        distillation.values(
            draft.config,
            target.config,
            distillation.Objective("forward_kl"),
            FLOAT32,
            temperature or 1.0,
        )
    )
    table = pipeline.Table(tokens=drafted.samples, start=np.full(64, 4, np.int32))
    found = metrics.on_examples(
        values, draft.params, target.params, table, 64, sharding.batch_sharding(None)
    )
    exact = found["acceptance" if temperature else "greedy_agreement"]
    # Positions that a round decides about are no fair sample of all: hence the rest.
    assert drafted.counted == pytest.approx(exact.mean, abs=exact.interval + 0.04)
    alpha = drafted.counted
    iid = (1 - alpha**5) / (1 - alpha)
    assert drafted.block_efficiency == pytest.approx(iid, rel=0.1)


def test_samples_are_the_target_s_whatever_the_draft():
    target = spread_model(32)
    drafting = metrics.Drafting(prompts=2, prompt_length=3, new_tokens=24)
    prompts = [[1, 2, 3], [4, 5, 6]]
    one, other = (
        metrics.by_sampling(target, nearby_model(target, seed), prompts, drafting, 0.0, 0)
        for seed in (1, 2)
    )
    assert np.array_equal(one.samples, other.samples)
    assert one.samples[:, :3].tolist() == prompts


def test_one_text_has_no_interval():
    assert metrics.means(np.ones((1, 8)), np.ones((1, 8))).interval is None


@pytest.mark.parametrize("temperatures", [None, 1.5, ("a",), (-1.0,), (float("nan"),)])
def test_temperatures_of_a_trial_that_are_none_are_refused(temperatures):
    with pytest.raises(InputError, match=r"^trial.temperatures: expected "):
        metrics.Drafting(temperatures=temperatures)


@pytest.mark.parametrize(
    "field", ["prompts", "prompt_length", "new_tokens", "num_speculative_tokens"]
)
def test_a_trial_that_is_none_is_refused(field):
    with pytest.raises(InputError, match=rf"^trial.{field}: expected an integer >= 1, found 0$"):
        metrics.Drafting(**{field: 0})
