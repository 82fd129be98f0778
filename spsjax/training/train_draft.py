"""Distillation of a draft: from a config and a target to a draft model."""

import dataclasses
import pathlib

import jax
from ml_collections import ConfigDict

from spsjax import loading
from spsjax.errors import InputError
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.training import distillation, draft_data
from spsjax.training import step as train_step
from spsjax.training.draft_evaluation import DraftEvalConfig, DraftEvaluator
from spsjax.training.target_cache import TargetCache
from spsjax.training.trainer import Trainer, TrainingCorpus, flops_per_token
from spsjax.types import PyTree
from spsjax.utils import from_config, hashing


@dataclasses.dataclass(frozen=True)
class _DraftSetup:
    """The checked sections of a config for `distill_draft`.

    Attributes:
        objective: training objective.
        mixture: kinds of training text.
        target_cache: what to cache of the target.
        draft_eval: how to evaluate the draft.
        target: loaded target.
        model: shape of the draft.
    """

    objective: distillation.Objective
    mixture: distillation.Mixture
    target_cache: TargetCache
    draft_eval: DraftEvalConfig
    target: Model
    model: transformer.Config


def check_draft_config(
    config: ConfigDict, workdir: str | pathlib.Path, mesh: jax.sharding.Mesh | None = None
) -> Model:
    """Raises the InputErrors of `distill_draft` without writing anything; returns the target."""
    return _check_setup(config, Trainer(config, workdir, mesh)).target


def distill_draft(
    config: ConfigDict,
    workdir: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    export: str | None = None,
) -> Model:
    """Distils a draft from a target.

    Args:
        config: config as in `configs/experiments/pystdlib_draft.py`.
        workdir: folder of the run, as for `train_target`.
        mesh: mesh of both models; None for one device.
        export: checkpoint to turn into `model` instead of training: a step, "latest" or "best".

    Raises:
        InputError: config, target, corpus and mesh do not fit together.
        Stopped: the process received SIGTERM, and has saved a checkpoint.
        NonFiniteError: the loss or a weight is not finite.
    """
    trainer = Trainer(config, workdir, mesh, export)
    setup = _check_setup(config, trainer)
    target, model, mixture = setup.target, setup.model, setup.mixture
    corpus = trainer.prepare_corpus(target.tokenizer)
    trainer.folder.pin(corpus=corpus.fingerprint, target=hashing.params_fingerprint(target.params))

    def as_model(params: PyTree) -> Model:
        return Model("draft", model, params, corpus.tokenizer, mesh)

    evaluator = _evaluator(setup, trainer, corpus, as_model)
    replace_batch = None
    if mixture.draft:
        replace_batch = distillation.on_policy(
            mixture, as_model, trainer.batch_sharding, config.seed
        )
    shapes = train_step.model_shapes(model, mesh)
    # A cached target costs next to nothing.
    runs_target = setup.target_cache.store == "nothing"
    frozen_params = transformer.num_params(target.params) if runs_target else 0
    params = trainer.run(
        f"Draft of {config.target}",
        shapes,
        lambda: trainer.init_model(model, shapes),
        distillation.distillation_metrics(model, target.config, setup.objective, trainer.precision),
        target.params,
        draft_data.batches(
            trainer,
            corpus,
            target,
            mixture,
            setup.target_cache,
            setup.objective.temperatures,
        ),
        evaluator.evaluate,
        replace_batch,
        flops_per_token(model, transformer.num_params(shapes), config.length, frozen_params),
    )
    return trainer.save(model, params, corpus.tokenizer)


def _check_setup(config: ConfigDict, trainer: Trainer) -> _DraftSetup:
    """Returns the checked sections of a config; writes nothing."""
    build = from_config.build
    objective = build("objective", distillation.Objective, config.objective)
    mixture = build("mixture", distillation.Mixture, config.mixture)
    cache = build("target_cache", TargetCache, config.target_cache)
    draft_eval = build("draft_eval", DraftEvalConfig, config.draft_eval)
    target = loading.load(config.target, trainer.mesh, trainer.precision.dtype)
    if target.tokenizer is None:
        raise InputError(f"{config.target}: expected a tokenizer beside the weights, found none")
    shared = {
        field: getattr(target.config, field)
        for field in ("vocab_size", "max_positions", "bos_id", "eos_ids")
    }
    model = build("model", transformer.Config, config.model, **shared)
    trainer.check_model(model)
    trainer.choose_tokenizer(target.tokenizer)
    mixture.check_fits(config.length)
    draft_eval.check_fits(target.config.max_positions, config.length + 1)
    return _DraftSetup(objective, mixture, cache, draft_eval, target, model)


def _evaluator(
    setup: _DraftSetup, trainer: Trainer, corpus: TrainingCorpus, as_model
) -> DraftEvaluator:
    """Returns the evaluator of the draft on the held-out examples."""
    count, wanted = len(corpus.held_out), setup.draft_eval.prompts
    if count < wanted:
        print(f"draft_eval: {count} prompts instead of {wanted}, one per held-out example")

    def metrics_at(temperature: float) -> train_step.PerTokenMetrics:
        return distillation.distillation_metrics(
            setup.model, setup.target.config, setup.objective, trainer.precision, temperature
        )

    return DraftEvaluator(
        setup.draft_eval,
        metrics_at,
        setup.target.params,
        lambda params: (setup.target, as_model(params)),
        corpus.held_out,
        0,
        trainer.eval_batch,
        trainer.batch_sharding,
        trainer.report,
    )
