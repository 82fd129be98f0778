"""Base class of drafters' tasks: the target, training texts and the evaluation."""

import abc

import jax
import numpy as np

from spsjax import loading
from spsjax.data import pipeline
from spsjax.errors import InputError
from spsjax.loading import LoadedDrafter, Model
from spsjax.training import metrics
from spsjax.training import step as train_step
from spsjax.training.config import DrafterConfig
from spsjax.training.draft_evaluation import sample_with_draft
from spsjax.training.target_cache import target_samples
from spsjax.training.tasks import base
from spsjax.types import PyTree


class DrafterTask(base.Task):
    """A drafter for a target.

    Attributes:
        target: target model.
        temperatures: temperatures at which the target's cache needs probabilities.
        tap_layers: layers of the target whose input is cached, too.
        skipped: number of first tokens per training text that do not count.
        evaluated_from: number of first tokens per evaluated text that do not count.
    """

    config: DrafterConfig
    temperatures: tuple[float, ...] = ()
    tap_layers: tuple[int, ...] = ()
    skipped = evaluated_from = 0

    def __init__(self, config: DrafterConfig, mesh):
        super().__init__(config, mesh)
        self.target = loading.load(config.target, mesh, config.compute.dtype)
        self.tokenizer, self.ends = self.target.tokenizer, self.target.config.eos_ids
        if self.tokenizer is None:
            raise InputError(
                f"{config.target}: expected a tokenizer beside the weights, found none"
            )

    def pinned(self):
        return {"target": self.target.params}

    def start(self, run):
        super().start(run)
        options, held_out = self.config.draft_eval, run.held_out
        count, wanted = len(held_out), options.prompts
        if count < wanted:
            print(f"draft_eval: {count} prompts instead of {wanted}, one per held-out example")
        rows = metrics.evenly_spaced(wanted, count)
        mask = run.held_out_columns.get("mask", np.ones_like(held_out))
        prompts = prompts_before_answers(held_out[rows], mask[rows], options.prompt_length)
        self._prompts = prompts.tolist()
        # Acceptance is not defined at temperature 0. Greedy agreement takes its place, and any
        # metrics function gives it.
        self._metrics_of = {
            temperature: jax.jit(self.metrics_at(temperature or 1.0))
            for temperature in (1.0, *options.temperatures)
        }

    @abc.abstractmethod
    def metrics_at(self, temperature: float) -> train_step.PerTokenMetrics:
        """Returns the metrics function of evaluations, whose "acceptance" is at a temperature."""

    @abc.abstractmethod
    def pair(self, params: PyTree) -> tuple[Model, Model | LoadedDrafter]:
        """Returns target and drafter, as `generate` takes them, from trained parameters."""

    def evaluate(self, step, params):
        """Reports all measurements and returns the expected acceptance rate on held-out text.

        The draft is evaluated on held-out text, and on texts that the target samples with it.
        """
        options = self.config.draft_eval
        start = np.full(len(self.run.held_out), self.evaluated_from)
        columns = self.run.held_out_columns
        held_out = self._expected(1.0, params, self.run.held_out, start, **columns)
        self.run.report(step, "held_out", held_out)
        for temperature in options.temperatures:
            pair = self.pair(params)
            result = sample_with_draft(*pair, self._prompts, options, temperature, step)
            start = np.full(len(self._prompts), max(options.prompt_length, self.evaluated_from))
            expected = self._expected(temperature, params, result.samples, start)
            kinds = ("acceptance", "greedy_agreement") if temperature else ("greedy_agreement",)
            record = {name: value for name, value in expected.items() if name.startswith(kinds)}
            record["counted_acceptance"] = result.counted_acceptance
            record["block_efficiency"] = result.block_efficiency
            self.run.report(step, f"temperature_{temperature:g}", record)
        return held_out["acceptance"]["mean"]

    def _expected(self, temperature: float, params: PyTree, tokens_NT, start_N, **columns) -> dict:
        """Returns the metrics of texts as a record; tokens before `start_N` do not count."""
        table = pipeline.Table(tokens=tokens_NT, start=start_N.astype(np.int32), **columns)
        return self.run.measure(self._metrics_of[temperature], params, self.frozen, table)

    def batches(self):
        config, run = self.config, self.run
        mixture, examples = config.mixture, run.train
        tables, shares = [], []
        if mixture.corpus or not mixture.target:
            # All tables of an iterator have the same columns: corpus examples count from end to
            # end.
            start, stop = (np.full(len(examples), end, np.int32) for end in (0, config.length + 1))
            tables.append(self._table(examples, start, stop=stop, **examples.columns))
            shares.append(mixture.corpus)
        if mixture.target:
            samples = target_samples(self.target, examples, mixture, run.cache, config.seed)
            if examples.columns:
                samples["mask"] = np.ones_like(samples["tokens"])
            tables.append(self._table(samples.pop("tokens"), **samples))
            shares.append(mixture.target)
        total = sum(shares)
        shares = [share / total if total else 1 / len(shares) for share in shares]
        return pipeline.BatchIterator(tables, shares, config.batch, config.seed, run.batch_sharding)

    def _table(self, examples, start: np.ndarray, **columns) -> pipeline.Table:
        """Returns the table of some texts, with what is cached of the target."""
        columns["start"] = np.maximum(start, self.skipped).astype(np.int32)
        if self.config.mixture.draft == 1:  # every batch is replaced: texts only serve as prompts
            return pipeline.Table(tokens=examples, **columns)
        run, dtype = self.run, self.config.compute.dtype
        options = self.temperatures, run.cache, run.batch_sharding, dtype, self.tap_layers
        cached = self.config.target_cache.columns(self.target, examples, *options)
        return pipeline.Table(tokens=examples, **columns, **cached)


def prompts_before_answers(tokens_NT: np.ndarray, mask_NT: np.ndarray, length: int) -> np.ndarray:
    """Returns prompts [N, length] of an evaluation: the tokens before an answer in each text.

    It is the first answer, a run of tokens that count, with enough tokens before it. A text without
    one, as a document is, gives its first tokens.
    """
    begins = (mask_NT[:, length:] > 0) & (mask_NT[:, length - 1 : -1] == 0)
    first = np.pad(begins, ((0, 0), (0, 1))).argmax(axis=1)  # 0 without an answer
    return np.take_along_axis(tokens_NT, first[:, None] + np.arange(length), axis=1)
