"""The contract of a task: what `fit` trains, and checks that tasks share."""

import abc
import dataclasses
import functools
import math
from collections.abc import Collection
from typing import ClassVar

import jax

from spsjax import loading
from spsjax.data import pipeline
from spsjax.errors import InputError
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.tokenization import Tokenizer
from spsjax.training import step as train_step
from spsjax.training.config import TrainingConfig
from spsjax.training.run import Run
from spsjax.types import PyTree
from spsjax.utils import from_config


class Task(abc.ABC):
    """A trainable result. `fit` calls `start` once, then the other methods.

    `mesh` is the mesh of all models and of batches; None: one device.

    Attributes:
        config_class: class of the config.
        title: description of the result, for the output.
        tokenizer: tokenizer of the corpus; None: one is trained.
        vocab_size: vocabulary size of a tokenizer to train.
        ends: token ids that end an assistant's turn, besides the tokenizer's end id.
        loss: metrics function, whose "loss" is minimised.
        run: the run, from `start` on.
        shapes: shapes of the trained parameters, with shardings, from `start` on.
        frozen: arrays that `loss` needs and that are not trained, from `start` on.
    """

    config_class: ClassVar[type[TrainingConfig]]
    title: str
    tokenizer: Tokenizer | None
    vocab_size: int | None = None
    ends: Collection[int] = ()
    loss: train_step.PerTokenMetrics
    run: Run
    shapes: PyTree
    frozen: PyTree

    def __init__(self, config: TrainingConfig, mesh: jax.sharding.Mesh | None):
        self.config, self.mesh = config, mesh

    def pinned(self) -> dict[str, PyTree]:
        """Returns parameters by name on which the run depends; a resumed run must have the same."""
        return {}

    def start(self, run: Run) -> None:
        """Prepares everything that depends on the corpus, which the run has tokenized."""
        self.run = run

    @abc.abstractmethod
    def batches(self) -> pipeline.BatchIterator:
        """Returns the training batches."""

    @abc.abstractmethod
    def init(self) -> PyTree:
        """Returns the initial parameters, in a copy that the training may consume."""

    def replace_batch(self, step: int, params: PyTree, batch: PyTree) -> PyTree:
        """Returns the batch of a step, or another batch that replaces it."""
        return batch

    @abc.abstractmethod
    def evaluate(self, step: int, params: PyTree) -> float:
        """Reports measurements on held-out text and returns a score. Higher is better."""

    @abc.abstractmethod
    def flops_per_token(self) -> float:
        """Returns the floating-point operations per training token."""

    @abc.abstractmethod
    def export(self, params: PyTree) -> Model | LoadedDrafter:
        """Writes the result to the run's folder and returns it."""


def build_model(options: dict, **shared) -> transformer.Config:
    """Returns the shape in the section `model` of a config."""
    return from_config.build_section("model", transformer.Config, options, **shared)


def check_length(config: TrainingConfig, context: int) -> None:
    """Raises InputError if the texts are longer than a model's context."""
    if config.length > context:
        raise InputError(f"length: expected at most the context, {context}, found {config.length}")


def check_model(
    config: TrainingConfig, mesh: jax.sharding.Mesh | None, model: transformer.Config
) -> None:
    """Raises InputError if the length, the mesh or the initial model do not fit the model."""
    check_length(config, model.max_positions)
    if mesh is not None:
        with from_config.whole_keys("model", [field.name for field in dataclasses.fields(model)]):
            sharding.check_divides(mesh, model)
    if not config.init:
        return
    initial, free = loading.load_config(config.init), {"bos_id", "eos_ids"}
    if model.positions == "rotary":  # no weight depends on them: a context may become longer
        free |= {"max_positions", "rope_theta", "rope_theta_local", "rope_scaling"}
    for field in dataclasses.fields(model):
        wanted, value = getattr(model, field.name), getattr(initial, field.name)
        fits = wanted == value or field.name in free
        divisor = ""
        if field.name == "num_layers":
            # A repeated layer must be like its trained copy.
            period = math.lcm(len(model.windows) or 1, len(model.changes) or 1)
            fits = wanted == value or (wanted % value == 0 and value % period == 0)
            divisor = " or a divisor of it" + f" by {period}" * (period > 1)
        if not fits:
            raise InputError(
                f"init: expected a model with {field.name}={wanted}{divisor}, found {value} in "
                f"{config.init}"
            )


def choose_tokenizer(init: str, tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Returns `tokenizer`, or the initial model's if it is None.

    Raises InputError if both exist and differ: the weights would be read with other tokens.
    """
    initial = loading.load_tokenizer(init) if init else None
    if tokenizer is not None and initial is not None and tokenizer != initial:
        raise InputError(
            f"init: expected a model with the tokenizer in {tokenizer.path.parent}, "
            f"found another one in {init}"
        )
    return initial if tokenizer is None else tokenizer


def init_model(task: Task, model: transformer.Config) -> PyTree:
    """Returns a model's initial parameters: random, or those of the folder `config.init`.

    A shallower initial model's layers are repeated (Du et al. 2024, arXiv 2405.15319).
    """
    if task.config.init:
        params = loading.load(task.config.init, task.mesh, dtype="float32").params
        return transformer.repeat_layers(params, model.num_layers)
    init = functools.partial(transformer.init, model)
    return train_step.random_params(init, task.shapes, task.config.seed)


def flops_per_token(
    model: transformer.Config, num_params: int, length: int, frozen_params: int = 0
) -> float:
    """Returns the floating-point operations per training token of a model.

    A forward pass takes 2 operations per parameter and token, a backward pass twice as many.
    Attention adds the scores and the weighted sum over, on average, half of the sequence. Frozen
    parameters only run forward.
    """
    attention = model.num_layers * model.num_heads * model.head_dim * length
    return 6 * (num_params + attention) + 2 * frozen_params
