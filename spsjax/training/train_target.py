"""Training of a target: from a config to a language model and its tokenizer."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from ml_collections import ConfigDict

from spsjax import tokenization
from spsjax.data import pipeline
from spsjax.errors import InputError
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.training import layer_skip, metrics
from spsjax.training import step as train_step
from spsjax.training.trainer import Trainer, flops_per_token
from spsjax.types import PyTree
from spsjax.utils import from_config


def train_target(
    config: ConfigDict,
    workdir: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    export: str | None = None,
) -> Model:
    """Trains a language model on a corpus, and its tokenizer unless the config names one.

    Args:
        config: config as in `configs/experiments/pystdlib_target.py`.
        workdir: folder of the run. It receives corpus, checkpoints, logs, curves and `model`. A
            run that it already holds is resumed.
        mesh: mesh from `sharding.mesh`; None for one device.
        export: checkpoint to turn into `model` instead of training: a step, "latest" or "best".

    Raises:
        InputError: config, corpus and mesh do not fit together. It is raised before any step.
        Stopped: the process received SIGTERM, and has saved a checkpoint.
        NonFiniteError: the loss or a weight is not finite.
    """
    trainer = Trainer(config, workdir, mesh, export)
    build_model = functools.partial(from_config.build, "model", transformer.Config, config.model)
    # Validate everything that does not need the corpus first: building it can take hours.
    trainer.check_model(build_model())
    skips = None
    if config.get("layer_skip"):
        skips = from_config.build("layer_skip", layer_skip.LayerSkip, config.layer_skip)
    named = tokenization.load(config.tokenizer) if config.tokenizer else None
    corpus = trainer.prepare_corpus(trainer.choose_tokenizer(named), config.model.vocab_size)
    tokenizer = corpus.tokenizer
    if tokenizer.vocab_size > config.model.vocab_size:
        raise InputError(
            f"model.vocab_size: expected at least the tokenizer's {tokenizer.vocab_size}, "
            f"found {config.model.vocab_size}"
        )
    model = build_model(bos_id=tokenizer.bos_id, eos_ids=(tokenizer.eos_id,))
    trainer.folder.pin(corpus=corpus.fingerprint)
    metrics_of = held_out_of = train_step.language_model_metrics(model, trainer.precision)
    if skips is not None:
        metrics_of = layer_skip.training_metrics(model, skips, trainer.precision)
        held_out_of = layer_skip.held_out_metrics(model, trainer.precision)
    batches = pipeline.BatchIterator(
        [pipeline.Table(tokens=corpus.train)],
        [1.0],
        config.batch,
        config.seed,
        trainer.batch_sharding,
    )
    shapes = train_step.model_shapes(model, mesh)
    params = trainer.run(
        "Target",
        shapes,
        lambda: trainer.init_model(model, shapes),
        metrics_of,
        {},
        batches,
        _held_out_loss(trainer, held_out_of, corpus.held_out),
        flops_per_token=flops_per_token(model, transformer.num_params(shapes), config.length),
    )
    return trainer.save(model, params, tokenizer)


def _held_out_loss(
    trainer: Trainer, metrics_of: train_step.PerTokenMetrics, held_out: np.ndarray
) -> Callable[[int, PyTree], float]:
    """Returns `(step, params) -> score`, which reports the loss on held-out examples."""
    jitted_metrics, table = jax.jit(metrics_of), pipeline.Table(tokens=held_out)

    def evaluate(step: int, params: PyTree) -> float:
        summaries = metrics.evaluate_batches(
            jitted_metrics, params, {}, table, trainer.eval_batch, trainer.batch_sharding
        )
        record = {name: dataclasses.asdict(summary) for name, summary in summaries.items()}
        trainer.report(step, "held_out", record)
        return -summaries["loss"].mean

    return evaluate
