"""Evaluation of a draft: its expected acceptance rate, and its acceptance while drafting."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from spsjax import generation
from spsjax.data import pipeline
from spsjax.errors import InputError, check_integer, check_number, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.sampling import SamplingParams
from spsjax.training import metrics
from spsjax.training import step as train_step
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class DraftEvalConfig:
    """Options of an evaluation by speculative sampling after prompts of held-out text.

    Attributes:
        prompts: number of prompts.
        prompt_length: tokens per prompt.
        new_tokens: new tokens per prompt.
        num_speculative_tokens: number of draft tokens per round, K.
        temperatures: sampling temperatures of target and draft, with one evaluation each. 0 is
            greedy.
    """

    prompts: int = 16
    prompt_length: int = 32
    new_tokens: int = 64
    num_speculative_tokens: int = 4
    temperatures: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self):
        for field in ("prompts", "prompt_length", "new_tokens", "num_speculative_tokens"):
            check_integer(f"draft_eval.{field}", getattr(self, field), 1)
        if not isinstance(self.temperatures, (tuple, list)):
            raise InputError(
                "draft_eval.temperatures: expected a tuple of numbers, "
                f"found {short_repr(self.temperatures)}"
            )
        for temperature in self.temperatures:
            check_number("draft_eval.temperatures", temperature, 0, 1e30)

    def check_fits(self, context: int, length: int, first: int = 0) -> None:
        """Raises InputError if the prompts or the samples are too long or too short.

        Args:
            context: longest sequence of the target.
            length: tokens per held-out example.
            first: number of tokens at the start of each text that do not count.
        """
        if self.prompt_length + self.new_tokens <= first:
            raise InputError(
                f"draft_eval.new_tokens: expected texts of more than {first} tokens, of which the "
                f"first do not count, found {self.prompt_length} + {self.new_tokens}"
            )
        longest = min(length, context - 1)
        if self.prompt_length > longest:
            raise InputError(
                f"draft_eval.prompt_length: expected at most {longest}, found {self.prompt_length}"
            )
        room = context - self.prompt_length
        if self.new_tokens > room:
            raise InputError(
                f"draft_eval.new_tokens: expected at most {room}, in a context of {context}, "
                f"found {self.new_tokens}"
            )
        if self.num_speculative_tokens >= context:
            raise InputError(
                f"draft_eval.num_speculative_tokens: expected less than the context of {context}, "
                f"found {self.num_speculative_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class DraftEvalResult:
    """Result of an evaluation by speculative sampling.

    Attributes:
        samples: [N, prompt + new tokens] int32 texts. Their new tokens are exact samples of the
            target, whatever the draft.
        counted_acceptance: share of draft tokens accepted, among those that the target decided on.
        block_efficiency: tokens per target call and text.
    """

    samples: np.ndarray
    counted_acceptance: float
    block_efficiency: float


def sample_with_draft(
    target: Model,
    draft: Model | LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    options: DraftEvalConfig,
    temperature: float,
    seed: int,
) -> DraftEvalResult:
    """Continues prompts by speculative sampling and counts the accepted draft tokens."""
    out = generation.generate(
        target,
        prompts,
        draft,
        options.num_speculative_tokens,
        SamplingParams(temperature=temperature),
        options.new_tokens,
        seed,
        stop_at_eos=False,
    )
    histogram = np.asarray(out.stats.accepted_histogram, np.float64)
    accepted = np.arange(len(histogram))
    # A round decides on its accepted tokens, and on one more unless all were accepted.
    decided = accepted + (accepted < len(histogram) - 1)
    samples = [[*prompt, *tokens] for prompt, tokens in zip(prompts, out.tokens)]
    return DraftEvalResult(
        np.asarray(samples, np.int32),
        float((histogram @ accepted) / max(1, histogram @ decided)),
        out.stats.block_efficiency,
    )


@dataclasses.dataclass
class DraftEvaluator:
    """Evaluates a draft on held-out text, and on texts that the target wrote with it.

    Attributes:
        options: options of the evaluation by speculative sampling.
        metrics_at: builds the metrics function whose "acceptance" is that at a temperature.
        frozen: arrays that the metrics function needs beside the parameters.
        pair_of: builds target and drafter, which `generate` takes, from the parameters.
        held_out: [N, T+1] held-out examples. Some of them, evenly spaced, begin the samples.
        first: number of tokens at the start of an example that do not count.
        batch: examples per batch.
        batch_sharding: sharding of the rows of a batch.
        report: takes `(step, group, record)` for every group of measurements.
    """

    options: DraftEvalConfig
    metrics_at: Callable[[float], train_step.PerTokenMetrics]
    frozen: PyTree
    pair_of: Callable[[PyTree], tuple[Model, Model | LoadedDrafter]]
    held_out: np.ndarray
    first: int
    batch: int
    batch_sharding: jax.sharding.Sharding
    report: Callable[[int, str, dict], None]

    def __post_init__(self):
        # Acceptance is not defined at temperature 0. Greedy agreement takes its place, and any
        # metrics function gives it.
        self._metrics_of = {
            temperature: jax.jit(self.metrics_at(temperature or 1.0))
            for temperature in (1.0, *self.options.temperatures)
        }
        rows = metrics.evenly_spaced(self.options.prompts, len(self.held_out))
        self._prompts = self.held_out[rows, : self.options.prompt_length].tolist()

    def evaluate(self, step: int, params: PyTree) -> float:
        """Reports all measurements and returns the expected acceptance rate on held-out text."""
        start = np.full(len(self.held_out), self.first, np.int32)
        table = pipeline.Table(tokens=self.held_out, start=start)
        held_out = self._expected(1.0, params, table)
        self.report(step, "held_out", held_out)
        for temperature in self.options.temperatures:
            result = sample_with_draft(
                *self.pair_of(params), self._prompts, self.options, temperature, step
            )
            start = np.full(len(self._prompts), self.options.prompt_length, np.int32)
            start = np.maximum(start, self.first)
            table = pipeline.Table(tokens=result.samples, start=start)
            expected = self._expected(temperature, params, table)
            kinds = ("acceptance", "greedy_agreement") if temperature else ("greedy_agreement",)
            record = {name: value for name, value in expected.items() if name.startswith(kinds)}
            record["counted_acceptance"] = result.counted_acceptance
            record["block_efficiency"] = result.block_efficiency
            self.report(step, f"temperature_{temperature:g}", record)
        return held_out["acceptance"]["mean"]

    def _expected(self, temperature: float, params: PyTree, table: pipeline.Table) -> dict:
        """Returns the metrics of a table of texts, as records for the log."""
        summaries = metrics.evaluate_batches(
            self._metrics_of[temperature],
            params,
            self.frozen,
            table,
            self.batch,
            self.batch_sharding,
        )
        return {name: dataclasses.asdict(summary) for name, summary in summaries.items()}
