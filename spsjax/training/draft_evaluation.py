"""What a draft under training is worth, measured now and then."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from spsjax.data import pipeline
from spsjax.errors import InputError
from spsjax.loading import Model
from spsjax.training import metrics
from spsjax.training import step as train_step
from spsjax.training.metrics import Drafting
from spsjax.types import PyTree


@dataclasses.dataclass
class Trials:
    """Measures a draft: on held-out text, and on texts that the target wrote with it.

    Attributes:
        trial: how it is tried out.
        values: `train.Values` whose acceptance is that at a temperature.
        target: the target.
        model: the draft as a model, of its parameters.
        held: [N, T+1] held-out examples, of which the first begin the trials' texts.
        rows: examples at a time.
        place: where they go.
        report: `(step, group, record)` takes what was found.
    """

    trial: Drafting
    values: Callable[[float], train_step.Values]
    target: Model
    model: Callable[[PyTree], Model]
    held: np.ndarray
    rows: int
    place: jax.sharding.Sharding
    report: Callable[[int, str, dict], None]

    def __post_init__(self):
        trial = self.trial
        # At temperature 0 there is no acceptance but agreement, which any values tell.
        self.measures = {t: jax.jit(self.values(t or 1.0)) for t in (1.0, *trial.temperatures)}
        count = min(trial.prompts, len(self.held))
        chosen = np.arange(count) * len(self.held) // count  # from all over the text
        self.prompts = self.held[chosen, : trial.prompt_length].tolist()

    def evaluate(self, step: int, params: PyTree) -> float:
        """Logs it; the score is the acceptance on held-out text."""
        found = self._exact(1.0, params, pipeline.Table(tokens=self.held))
        self.report(step, "held_out", found)
        for temperature in self.trial.temperatures:
            drafted = metrics.by_sampling(
                self.target, self.model(params), self.prompts, self.trial, temperature, step
            )
            start = np.full(len(self.prompts), self.trial.prompt_length, np.int32)
            table = pipeline.Table(tokens=drafted.samples, start=start)
            exact = self._exact(temperature, params, table)
            names = ("acceptance", "greedy_agreement") if temperature else ("greedy_agreement",)
            record = {name: exact[name] for name in names}
            record |= {"counted": drafted.counted, "block_efficiency": drafted.block_efficiency}
            self.report(step, f"temperature_{temperature:g}", record)
        return found["acceptance"]["mean"]

    def _exact(self, temperature: float, params: PyTree, table: pipeline.Table) -> dict[str, dict]:
        found = metrics.on_examples(
            self.measures[temperature], params, self.target.params, table, self.rows, self.place
        )
        return {name: dataclasses.asdict(means) for name, means in found.items()}


def check(trial: metrics.Drafting, context: int, length: int) -> None:
    """Raises InputError where texts of this length, or this context, are too short for a trial."""
    width = min(length, context - 1)
    if trial.prompt_length > width:
        raise InputError(
            f"trial.prompt_length: expected at most {width}, found {trial.prompt_length}"
        )
    room = context - trial.prompt_length
    if trial.new_tokens > room:
        raise InputError(
            f"trial.new_tokens: expected at most {room}, in a context of {context}, "
            f"found {trial.new_tokens}"
        )
    if trial.num_speculative_tokens >= context:
        raise InputError(
            f"trial.num_speculative_tokens: expected less than the context of {context}, "
            f"found {trial.num_speculative_tokens}"
        )
