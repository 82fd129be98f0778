"""Whole trainings, from a config to a model folder: of a target, and of a draft."""

import dataclasses
import pathlib

import jax
import numpy as np
from ml_collections import ConfigDict

from spsjax import loading, tokenization
from spsjax.data import pipeline
from spsjax.errors import InputError
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.training import distillation, draft_evaluation, metrics, target_cache
from spsjax.training import step as train_step
from spsjax.training.trainer import Recipe
from spsjax.types import PyTree
from spsjax.utils import from_config, hashing


def target(
    config: ConfigDict, workdir: str | pathlib.Path, mesh=None, export: str | None = None
) -> Model:
    """Trains a language model, and its tokenizer unless one is given, on a corpus.

    Args:
        config: as `configs/experiments/pystdlib_target.py` has it.
        workdir: the run's folder: corpus, checkpoints, logs, curves, and at last `model`.
        mesh: `sharding.mesh`; None: one device.
        export: trains no more, but makes one checkpoint of the run its `model`: a step, "latest" or
            "best".

    Raises:
        InputError: the config, the corpus or the mesh do not fit each other; before any step.
        Stopped: SIGTERM came. NonFiniteError: the loss is not finite.
    """
    recipe = Recipe(config, workdir, mesh, export)
    # What can be checked without the corpus is: it may take hours to make.
    recipe.check(from_config.build("model", transformer.Config, config.model))
    pieces = recipe.same_pieces(tokenization.load(config.tokenizer) if config.tokenizer else None)
    training, held_out, pieces, made_of = recipe.examples(pieces, config.model.vocab_size)
    if pieces.vocab_size > config.model.vocab_size:
        raise InputError(
            f"model.vocab_size: expected at least the tokenizer's {pieces.vocab_size}, "
            f"found {config.model.vocab_size}"
        )
    model = from_config.build(
        "model", transformer.Config, config.model, bos_id=pieces.bos_id, eos_ids=(pieces.eos_id,)
    )
    recipe.folder.pin(corpus=made_of)
    values = train_step.language_model(model, recipe.compute)
    held = pipeline.Table(tokens=recipe.some(held_out))
    measure = jax.jit(values)

    def evaluate(step: int, params: PyTree) -> float:
        found = metrics.on_examples(measure, params, {}, held, recipe.rows, recipe.place)
        recipe.report(step, "held_out", {"loss": dataclasses.asdict(found["loss"])})
        return -found["loss"].mean

    feed = pipeline.Feed(
        [pipeline.Table(tokens=training)], [1.0], config.batch, config.seed, recipe.place
    )
    return recipe.run(model, pieces, values, {}, feed, evaluate)


class _Distillation:
    """The parts of a config for `draft`, checked; nothing is written."""

    def __init__(self, config: ConfigDict, workdir: str | pathlib.Path, mesh, export: str | None):
        self.recipe = recipe = Recipe(config, workdir, mesh, export)
        build = from_config.build
        self.objective = build("objective", distillation.Objective, config.objective)
        self.mixture = build("mixture", distillation.Mixture, config.mixture)
        self.teacher = build("teacher", target_cache.Teacher, config.teacher)
        self.trial = build("trial", metrics.Drafting, config.trial)
        self.target = loading.load(config.target, mesh, recipe.compute.dtype)
        if self.target.tokenizer is None:
            raise InputError(
                f"{config.target}: expected a tokenizer beside the weights, found none"
            )
        shared = {
            field: getattr(self.target.config, field)
            for field in ("vocab_size", "max_positions", "bos_id", "eos_ids")
        }
        self.model = build("model", transformer.Config, config.model, **shared)
        recipe.check(self.model)
        recipe.same_pieces(self.target.tokenizer)
        if (self.mixture.target or self.mixture.draft) and (
            self.mixture.prompt_length >= config.length
        ):
            raise InputError(
                f"mixture.prompt_length: expected less than length={config.length}, "
                f"found {self.mixture.prompt_length}"
            )
        draft_evaluation.check(self.trial, self.target.config.max_positions, config.length + 1)


def check_draft(config: ConfigDict, workdir: str | pathlib.Path, mesh=None) -> Model:
    """Raises InputError where `draft` would before it makes anything; gives the target."""
    return _Distillation(config, workdir, mesh, None).target


def draft(
    config: ConfigDict, workdir: str | pathlib.Path, mesh=None, export: str | None = None
) -> Model:
    """Distils a draft from a target.

    Args:
        config: as `configs/experiments/pystdlib_draft.py` has it.
        workdir: see `target`.
        mesh: of both.
        export: see `target`.

    Raises:
        InputError, Stopped, NonFiniteError: see `target`.
    """
    parts = _Distillation(config, workdir, mesh, export)
    recipe, teaching, model, mixture = parts.recipe, parts.target, parts.model, parts.mixture
    training, held_out, pieces, made_of = recipe.examples(teaching.tokenizer)
    recipe.folder.pin(corpus=made_of, target=hashing.params_fingerprint(teaching.params))
    objective, trial, place = parts.objective, parts.trial, recipe.place

    def as_model(params: PyTree) -> Model:
        return Model("draft", model, params, pieces, mesh)

    def measure(temperature: float) -> train_step.Values:
        return distillation.values(model, teaching.config, objective, recipe.compute, temperature)

    held = recipe.some(held_out)
    if len(held) < trial.prompts:
        print(f"trial: {len(held)} prompts, as many as held-out examples, not {trial.prompts}")
    tried = draft_evaluation.Trials(
        trial, measure, teaching, as_model, held, recipe.rows, place, recipe.report
    )

    def table(examples, **columns) -> pipeline.Table:
        if mixture.draft == 1:  # the texts are prompts only
            return pipeline.Table(tokens=examples, **columns)
        kept = parts.teacher.columns(
            teaching, examples, objective.temperatures, recipe.cache, place, recipe.compute.dtype
        )
        return pipeline.Table(tokens=examples, **columns, **kept)

    tables, shares = [], []
    if mixture.corpus or not mixture.target:
        whole = {"start": 0, "stop": config.length + 1}
        ends = {name: np.full(len(training), end, np.int32) for name, end in whole.items()}
        tables.append(table(training, **ends))
        shares.append(mixture.corpus)
    if mixture.target:
        samples = target_cache.samples(teaching, training, mixture, recipe.cache, config.seed)
        tables.append(table(samples.pop("tokens"), **samples))
        shares.append(mixture.target)
    total = sum(shares)
    shares = [share / total if total else 1 / len(shares) for share in shares]
    feed = pipeline.Feed(tables, shares, config.batch, config.seed, place)

    change = None
    if mixture.draft:
        change = distillation.on_policy(mixture, as_model, place, config.seed)
    values = distillation.values(model, teaching.config, objective, recipe.compute)
    seen = 0 if parts.teacher.keep != "nothing" else transformer.num_params(teaching.params)
    return recipe.run(model, pieces, values, teaching.params, feed, tried.evaluate, change, seen)
