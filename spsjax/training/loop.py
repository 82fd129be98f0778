"""The training loop: steps, evaluation and checkpoints. A killed run can be resumed at any time."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from spsjax.data import pipeline
from spsjax.errors import NonFiniteError, Stopped
from spsjax.training import run_folder
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.config import TrainingConfig
from spsjax.training.progress import Progress
from spsjax.training.step import all_finite
from spsjax.training.tasks.base import Task
from spsjax.types import PyTree


def train_loop(
    task: Task,
    config: TrainingConfig,
    folder: run_folder.Folder,
    checkpoints: Checkpoints,
    shapes: PyTree,
    init_state: Callable[[], PyTree],
    train_step: Callable,
    batches: pipeline.BatchIterator,
) -> PyTree:
    """Runs the remaining steps of a run and returns its final state.

    A run that is killed and resumed ends with the same state, bit-identical on the same devices.
    `init_state` is called only without a checkpoint. `train_step` maps `(state, frozen, batch)` to
    `(state, metrics)` and consumes the state.

    Raises:
        Stopped: the process received SIGTERM, and has saved a checkpoint.
        NonFiniteError: the loss or a weight is not finite. Earlier checkpoints remain.
    """
    if restored := checkpoints.restore(shapes):
        start, state, iterator_state = restored
        batches.restore(iterator_state)
    else:
        start, state = 0, init_state()
    folder.begin(start)
    if start >= config.steps:
        return state
    tokens = config.batch * config.length
    flops = task.flops_per_token() * tokens
    with _sigterm() as stop_after, Progress(start, config.steps, tokens, flops) as progress:
        for step in range(start + 1, config.steps + 1):
            batch = task.replace_batch(step, state["params"], next(batches))
            state, metrics = train_step(state, task.frozen, batch)
            progress.advance()
            stop, evaluates = stop_after(step), config.evaluates(step)
            if stop or evaluates or step % config.log_every == 0:
                _log(folder, step, metrics, progress)
            if stop or evaluates:
                with progress.paused():
                    _check_finite(step, state["params"])
                    score = task.evaluate(step, state["params"]) if evaluates else -math.inf
                    checkpoints.save(step, state, batches.state(), score)
            if stop and step < config.steps:
                checkpoints.wait()
                raise Stopped(f"stopped at step {step}, saved. Run the same command to resume")
        checkpoints.wait()
    return state


def _log(folder: run_folder.Folder, step: int, metrics: dict, progress: Progress) -> None:
    """Logs the metrics of a step; raises NonFiniteError if the loss is not finite."""
    metrics = {name: float(value) for name, value in metrics.items()}
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteError(f"step {step}: expected a finite loss, found {metrics['loss']}")
    folder.log(step, "train", **metrics, **progress.measure(metrics["loss"]))


def _check_finite(step: int, params: PyTree) -> None:
    """Raises NonFiniteError if a weight is not finite."""
    if not all_finite(params):
        raise NonFiniteError(
            f"step {step}: expected finite weights, found a NaN or an infinity. They are not saved"
        )


@contextlib.contextmanager
def _sigterm() -> Iterator[Callable[[int], bool]]:
    """Catches SIGTERM and yields `step -> stop`, the same answer in every process."""
    if jax.process_count() > 1:
        # jax.distributed tells every process of a signal to any of them.
        yield multihost_utils.reached_preemption_sync_point
        return
    received = False

    def receive(*_):
        nonlocal received
        received = True

    # Only the main thread may set a signal handler.
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, receive) if in_main_thread else None
    try:
        yield lambda step: received
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
