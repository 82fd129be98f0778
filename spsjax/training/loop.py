"""The training loop: steps, evaluation and checkpoints. A killed run can be resumed at any time."""

import contextlib
import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from spsjax.data import pipeline
from spsjax.errors import NonFiniteError, Stopped, check_integer
from spsjax.training import run_folder
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.progress import Progress
from spsjax.training.step import all_finite
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Training intervals, in steps.

    Attributes:
        steps: number of steps in the whole run.
        eval_every: steps between two evaluations, each followed by a checkpoint. The last step is
            always evaluated and saved.
        log_every: steps between two log records of loss and speed.
    """

    steps: int
    eval_every: int
    log_every: int = 10

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_integer(field.name, getattr(self, field.name), 1)

    def evaluates(self, step: int) -> bool:
        """Returns whether the run evaluates and saves after a step."""
        return step % self.eval_every == 0 or step == self.steps

    def logs(self, step: int) -> bool:
        """Returns whether the run logs loss and speed after a step."""
        return step % self.log_every == 0


def train_loop(
    folder: run_folder.Folder,
    checkpoints: Checkpoints,
    intervals: Intervals,
    *,
    shapes: PyTree,
    init_state: Callable[[], PyTree],
    train_step: Callable,
    frozen: PyTree,
    batches: pipeline.BatchIterator,
    evaluate: Callable[[int, PyTree], float],
    replace_batch: Callable[[int, PyTree, PyTree], PyTree] | None = None,
    tokens: int = 0,
    flops: float = 0.0,
) -> PyTree:
    """Runs the remaining steps of a run and returns its final state.

    A run that is killed and resumed ends with the same state, bit-identical on the same devices.

    Args:
        folder: folder of the run.
        checkpoints: checkpoints of the run. The newest one is resumed.
        intervals: when to evaluate, save and log.
        shapes: shapes of the training state, with shardings.
        init_state: creates the first state; called only if there is no checkpoint.
        train_step: `(state, frozen, batch) -> (state, metrics)`, which consumes the state.
        frozen: arrays that are not trained.
        batches: training batches.
        evaluate: `(step, params) -> score`, which logs its measurements. Higher is better.
        replace_batch: `(step, params, batch) -> batch`, which may substitute a batch.
        tokens, flops: tokens and floating-point operations per step, to report the speed.

    Raises:
        Stopped: the process received SIGTERM, and has saved a checkpoint.
        NonFiniteError: the loss or a weight is not finite. Earlier checkpoints remain.
    """
    start, state = _restore_or_init(checkpoints, shapes, init_state, batches)
    folder.begin(start)
    if start >= intervals.steps:
        return state
    with _sigterm() as stop_after, Progress(start, intervals.steps, tokens, flops) as progress:
        for step in range(start + 1, intervals.steps + 1):
            batch = next(batches)
            if replace_batch is not None:
                batch = replace_batch(step, state["params"], batch)
            state, metrics = train_step(state, frozen, batch)
            progress.advance()
            stop, evaluates = stop_after(step), intervals.evaluates(step)
            if stop or evaluates or intervals.logs(step):
                _log(folder, step, metrics, progress)
            if stop or evaluates:
                with progress.paused():
                    _check_finite(step, state["params"])
                    score = evaluate(step, state["params"]) if evaluates else -math.inf
                    checkpoints.save(step, state, batches.state(), score)
            if stop and step < intervals.steps:
                checkpoints.wait()
                raise Stopped(f"stopped at step {step}, saved. Run the same command to resume")
        checkpoints.wait()
    return state


def _restore_or_init(checkpoints, shapes, init_state, batches) -> tuple[int, PyTree]:
    """Returns the number of finished steps and the state; moves the batches to that step."""
    restored = checkpoints.restore(shapes)
    if restored is None:
        return 0, init_state()
    start, state, iterator_state = restored
    batches.restore(iterator_state)
    return start, state


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
