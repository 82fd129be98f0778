"""Tests of the training loop around a step of two numbers: stops, resumes, and broken weights."""

import json
import os
import signal
from unittest import mock

import jax
import numpy as np
import pytest

from spsjax.data import pipeline
from spsjax.errors import NonFiniteError, Stopped
from spsjax.parallel import sharding
from spsjax.training import config, loop
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.run_folder import Folder

ONE_DEVICE = sharding.batch_sharding(None)
WEIGHTS = {"weights": jax.ShapeDtypeStruct((2,), np.float32, sharding=ONE_DEVICE)}
STEPS = 9
CHANGES = {"steps": STEPS, "eval_every": 4, "log_every": 1, "batch": 4, "length": 1}
CONFIG = config.read(
    config.TargetConfig,
    config.default(config.TargetConfig, model={}, optimization={"warmup": 0}, **CHANGES).to_dict(),
)


def state_of(weights):
    return {"params": {"weights": jax.device_put(np.asarray(weights, np.float32), ONE_DEVICE)}}


def train_step(state, frozen, batch):
    """Moves the weights to a mix of themselves and the batch, whose order they remember."""
    weights = np.asarray(state["params"]["weights"])
    weights = np.float32(0.7) * weights + np.asarray(batch["tokens"], np.float32).mean(axis=0)
    return state_of(weights), {"loss": weights.sum() + frozen}


def train(
    folder,
    step=train_step,
    replace_batch=lambda step, params, batch: batch,
    evaluate=lambda step, params: step,
):
    """Runs the loop, or the rest of it, and returns the final weights."""
    tokens = np.random.default_rng(0).integers(0, 9, (20, 2)).astype(np.int32)
    batches = pipeline.BatchIterator([pipeline.Table(tokens=tokens)], [1.0], 4, 0, ONE_DEVICE)
    task = mock.Mock(frozen=1.0, replace_batch=replace_batch, evaluate=evaluate)
    task.flops_per_token.return_value = 0.0
    with Checkpoints(folder / "checkpoints") as checkpoints:
        state = loop.train_loop(
            task, CONFIG, Folder(folder, {}), checkpoints, {"params": WEIGHTS},
            lambda: state_of([0, 0]), step, batches,
        )  # fmt: skip
    return np.asarray(state["params"]["weights"])


def losses(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def test_stopped_and_killed_runs_end_like_an_undisturbed_one(tmp_path):
    """SIGTERM saves the step that is running, and a kill loses the steps since a checkpoint."""
    expected = train(tmp_path / "whole")
    assert [step for step, _ in losses(tmp_path / "whole")] == [*range(1, STEPS + 1)]
    seen = []

    def disturbed(step, params, batch):
        seen.append((step, np.asarray(params["weights"])))
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if len(seen) == 6:  # two steps after a checkpoint
            raise KeyboardInterrupt
        return batch

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=r"^stopped at step 3, saved. Run the same command to resume"):
        train(tmp_path / "run", replace_batch=disturbed)
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", replace_batch=disturbed)
    np.testing.assert_array_equal(train(tmp_path / "run"), expected)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert [step for step, _ in seen] == [*range(1, 7)]


def test_loss_or_weights_that_are_not_finite_end_the_run(tmp_path):
    """Weights are looked at before they are evaluated, as their loss may be finite."""
    evaluated = []

    def step(state, frozen, batch, calls=iter(range(1, STEPS + 6))):
        state, metrics = train_step(state, frozen, batch)
        call = next(calls)
        metrics |= {"loss": np.nan} if call == 6 else {}
        return (state_of([np.inf, 1]) if call == 6 + 4 else state), metrics

    def evaluate(step, params):
        evaluated.append(step)
        return 0.0

    with pytest.raises(NonFiniteError, match=r"^step 6: expected a finite loss, found nan"):
        train(tmp_path, step, evaluate=evaluate)
    with pytest.raises(NonFiniteError, match=r"^step 8: expected finite weights"):
        train(tmp_path, step, evaluate=evaluate)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [4] == evaluated
