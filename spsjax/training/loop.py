"""The loop of a training: steps, measurements, checkpoints. It may end at any time, and go on."""

import dataclasses
import math
import signal
import threading
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from spsjax.data import pipeline
from spsjax.errors import InputError, NonFiniteError, Stopped
from spsjax.training import run_folder
from spsjax.training import step as train_step
from spsjax.training.checkpoints import Checkpoints
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Pace:
    """How often: all in steps.

    Attributes:
        steps: of the whole run.
        eval_every: evaluates and saves; it does so at the end, too.
        log_every: logs loss and speed.
    """

    steps: int
    eval_every: int
    log_every: int = 10

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise InputError(f"{field.name}: expected an integer >= 1, found {value!r}")


def fit(
    folder: run_folder.Folder,
    checkpoints: Checkpoints,
    pace: Pace,
    shapes: PyTree,
    initial: Callable[[], PyTree],
    step: Callable,
    frozen: PyTree,
    feed: pipeline.Feed,
    evaluate: Callable[[int, PyTree], float],
    change: Callable[[int, PyTree, PyTree], PyTree] | None = None,
    tokens: int = 0,
    flops: float = 0.0,
) -> PyTree:
    """Runs the steps that are left of a run, and returns its state at the end.

    Killed at any moment and called again with the same arguments, it ends with the same state: to
    the bit, on the same devices. SIGTERM makes it save at the next step.

    Args:
        folder: the run's.
        checkpoints: the run's; the newest is gone on from.
        pace: how often what.
        shapes: of parameters and optimiser state, with their shardings.
        initial: makes them, where there is no checkpoint: large ones fit into memory once.
        step: `(state, frozen, batch) -> (state, metrics)`, which takes the state's memory.
        frozen: what is not trained.
        feed: the batches.
        evaluate: `(step, params) -> score`, and logs what it finds; the higher, the better.
        change: `(step, params, batch) -> batch`, what is trained on in place of a batch.
        tokens, flops: of one step, to show speed.

    Raises:
        Stopped: after a SIGTERM; the message says where.
        NonFiniteError: the loss is not finite; checkpoints before that are there.
    """
    restored = checkpoints.restore(shapes)
    if restored:
        start, state, position = restored
        feed.restore(position)
    else:
        start, state = 0, initial()
    folder.go_on(start)
    if start >= pace.steps:
        return state
    with _Sigterm() as sigterm, run_folder.Progress(start, pace.steps, tokens, flops) as progress:
        for number in range(start + 1, pace.steps + 1):
            batch = next(feed)
            if change is not None:
                batch = change(number, state["params"], batch)
            state, metrics = step(state, frozen, batch)
            progress.advance()
            stop = sigterm.received(number)
            whole = number % pace.eval_every == 0 or number == pace.steps
            if whole or stop or number % pace.log_every == 0:
                metrics = {name: float(value) for name, value in metrics.items()}
                if not math.isfinite(metrics["loss"]):
                    raise NonFiniteError(
                        f"step {number}: expected a finite loss, found {metrics['loss']}"
                    )
                folder.log(number, "train", **metrics, **progress.measure(metrics["loss"]))
            if whole or stop:
                progress.pause()
                if not train_step.all_finite(state["params"]):
                    found = "a NaN or an infinity, which are not saved"
                    raise NonFiniteError(f"step {number}: expected finite weights, found {found}")
                score = evaluate(number, state["params"]) if whole else -math.inf
                checkpoints.save(number, state, feed.state(), score)
                progress.go_on()
            if stop and number < pace.steps:
                checkpoints.wait()
                raise Stopped(f"stopped at step {number}, saved; the same command goes on from it")
        checkpoints.wait()
    return state


class _Sigterm:
    """Notices that this process, or another one of the run, was told to end."""

    def __enter__(self) -> "_Sigterm":
        self._told, self._before = False, None
        self._alone = jax.process_count() == 1
        # Of several processes, each hears of a signal to any of them from jax.distributed.
        if self._alone and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def received(self, step: int) -> bool:
        """Whether to end after this step: the same answer in all processes."""
        return self._told if self._alone else multihost_utils.reached_preemption_sync_point(step)

    def _notice(self, *_) -> None:
        self._told = True
