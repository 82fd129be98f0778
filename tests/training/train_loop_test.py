"""Tests of the training loop around a step of two numbers: stops, resumes, and broken weights."""

import json
import os
import signal

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from spsjax.data import pipeline
from spsjax.errors import NonFiniteError, Stopped
from spsjax.parallel import sharding
from spsjax.training import loop
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.run_folder import Folder

ONE_DEVICE = sharding.batch_sharding(None)
WEIGHTS = {"weights": jax.ShapeDtypeStruct((2,), np.float32, sharding=ONE_DEVICE)}
STEPS = 9


def state_of(weights):
    return {"params": {"weights": jax.device_put(np.asarray(weights, np.float32), ONE_DEVICE)}}


def train_step(state, frozen, batch):
    """Moves the weights to a mix of themselves and the batch, whose order they remember."""
    weights = np.asarray(state["params"]["weights"])
    weights = np.float32(0.7) * weights + np.asarray(batch["tokens"], np.float32).mean(axis=0)
    return state_of(weights), {"loss": weights.sum() + frozen}


def train(folder, step=train_step, replace_batch=None, evaluate=lambda step, params: step):
    """Runs the loop, or the rest of it, and returns the final weights."""
    tokens = np.random.default_rng(0).integers(0, 9, (20, 2)).astype(np.int32)
    batches = pipeline.BatchIterator([pipeline.Table(tokens=tokens)], [1.0], 4, 0, ONE_DEVICE)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        state = loop.train_loop(
            Folder(folder, ConfigDict()),
            checkpoints,
            loop.Intervals(STEPS, eval_every=4, log_every=1),
            shapes={"params": WEIGHTS},
            init_state=lambda: state_of([0, 0]),
            train_step=step,
            frozen=1.0,
            batches=batches,
            evaluate=evaluate,
            replace_batch=replace_batch,
        )
    return np.asarray(state["params"]["weights"])


def losses(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def saved(folder):
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.steps()


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


def test_loss_that_is_not_finite_ends_the_run(tmp_path):
    def step(state, frozen, batch, calls=iter(range(STEPS))):
        state, metrics = train_step(state, frozen, batch)
        return state, metrics | ({"loss": np.nan} if next(calls) == 5 else {})

    with pytest.raises(NonFiniteError, match=r"^step 6: expected a finite loss, found nan"):
        train(tmp_path, step)
    assert saved(tmp_path) == [4]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """They are looked at before they are evaluated, as their loss may be finite."""
    evaluated = []

    def step(state, frozen, batch, calls=iter(range(STEPS))):
        state, metrics = train_step(state, frozen, batch)
        return (state_of([np.inf, 1]) if next(calls) == 7 else state), metrics

    def evaluate(step, params):
        evaluated.append(step)
        return 0.0

    with pytest.raises(NonFiniteError, match=r"^step 8: expected finite weights"):
        train(tmp_path, step, evaluate=evaluate)
    assert saved(tmp_path) == [4] == evaluated
