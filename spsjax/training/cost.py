"""Time that a training step takes, of several trainings in turn, on texts of one size.

What is learned depends on weights, texts and the number of steps; what a step costs does not. So a
few steps on one batch are enough.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import step as train_step
from spsjax.training.config import TrainingConfig
from spsjax.training.run import Run
from spsjax.training.run_folder import Folder
from spsjax.training.tasks.base import Task


class CompiledTraining:
    """Training whose step is compiled, and which runs it on its first batch again and again.

    Args:
        task, config, folder: what `training.fit.prepare` returns. The folder receives the corpus.

    Attributes:
        tokens: tokens per step.
        parameters: number of trained parameters.
        operations: floating-point operations per token, without those of the vocabulary.
        compile_seconds: seconds until the step was compiled, or read from the cache of programs.
    """

    def __init__(self, task: Task, config: TrainingConfig, folder: Folder):
        run = Run(config, folder, task.mesh, task.tokenizer, task.vocab_size, task.ends)
        task.start(run)
        self._mesh, self._frozen = task.mesh, task.frozen
        self.tokens = config.batch * config.length
        self.parameters = transformer.num_params(task.shapes)
        self.operations = task.flops_per_token()
        with sharding.use_mesh(task.mesh):
            params = task.init()
            shapes = train_step.state_shapes(task.shapes, config.optimization)
            self._state = train_step.init_state(params, shapes, config.optimization)
            self._batch = task.replace_batch(1, params, next(task.batches()))
            step, begun = train_step.make_step(task.loss, config.optimization), time.perf_counter()
            self._step = step.lower(self._state, self._frozen, self._batch).compile()
        self.compile_seconds = time.perf_counter() - begun

    def time(self, steps: int) -> float:
        """Returns the seconds per step of that many steps."""
        with sharding.use_mesh(self._mesh):
            begun = time.perf_counter()
            for _ in range(steps):
                self._state, _ = self._step(self._state, self._frozen, self._batch)
            jax.block_until_ready(self._state)
        return (time.perf_counter() - begun) / steps


def time_in_turns(
    trainings: Mapping[str, CompiledTraining],
    repetitions: int,
    steps: int,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[dict]:
    """Returns a record per training: times per token, and their ratios to those of the first.

    A turn times every training once, after one turn that is not counted. A ratio is one of the same
    turn, so that a machine that slows down changes no ratio.
    """
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in progress(range(repetitions + 1)):
        for name, training in trainings.items():
            value = training.time(steps) / training.tokens
            if turn:
                seconds[name].append(value)
    first = next(iter(seconds.values()))
    return [
        {
            "name": name,
            "parameters": trainings[name].parameters,
            "operations_per_token": trainings[name].operations,
            "us_per_token": 1e6 * statistics.median(own),
            **_ratio(own, first),
            "compile_seconds": trainings[name].compile_seconds,
        }
        for name, own in seconds.items()
    ]


def _ratio(own: Sequence[float], first: Sequence[float]) -> dict[str, object]:
    """Returns the median of the ratios of each turn, and the extremes."""
    ratios = [value / base for value, base in zip(own, first)]
    return {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}
