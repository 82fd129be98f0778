"""Configs of trainings as trees of frozen classes, which check themselves when they are read."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from spsjax.data.documents import Sources
from spsjax.errors import InputError, short_repr
from spsjax.runtime.batch import check_seed
from spsjax.training.distillation import Mixture, Objective
from spsjax.training.draft_evaluation import DraftEvalConfig
from spsjax.training.feature_losses import FeatureObjective
from spsjax.training.layer_skip import LayerSkip
from spsjax.training.optimizer import OptimizerConfig
from spsjax.training.step import Precision
from spsjax.training.target_cache import TargetCache
from spsjax.utils import from_config
from spsjax.utils.fields import Checked, flag, integer

# The sizes of a layer that drafts, in the section `drafter`: 0 is the target's size.
LAYER_SIZES = {"d_ff": 0, "num_heads": 0, "num_kv_heads": 0, "head_dim": 0}


@dataclasses.dataclass(frozen=True)
class Mesh(Checked):
    """Numbers of devices."""

    data: int = integer(1, 1)  # devices that split a batch
    model: int = integer(1)  # devices that split the weights; 0: all that there are


@dataclasses.dataclass(frozen=True)
class FeaturesMesh(Mesh):
    """Numbers of devices for a target and a drafter of its features.

    Attributes:
        replicate: whether every device holds the whole drafter, or a part of it by the target's
            rules.
    """

    replicate: bool = flag(True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
    """Options of every training."""

    init: str = ""  # folder of the model or drafter to begin with; empty: random weights
    data: Sources  # documents to train and to evaluate on
    length: int = integer(512, 1)  # tokens per example
    batch: int = integer(2, 1)  # examples per step
    steps: int = integer(least=1)  # number of steps in the whole run
    optimization: OptimizerConfig  # options of the optimizer
    compute: Precision  # numerical options of forward passes
    mesh: Mesh  # numbers of devices
    seed: int = 0  # random seed
    # Steps between two evaluations, each followed by a checkpoint. The last step is always
    # evaluated and saved.
    eval_every: int = integer(1000, 1)
    eval_examples: int = integer(64, 1)  # number of held-out examples
    log_every: int = integer(10, 1)  # steps between two log records of loss and speed
    # Numbers of newest and of best checkpoints to keep.
    keep: int = integer(2, 1)
    keep_best: int = integer(1)

    def __post_init__(self):
        super().__post_init__()
        check_seed(self.seed)
        for field in ("init", "tokenizer", "cache"):
            value = getattr(self, field, "")
            if not isinstance(value, str) or "\0" in value:
                raise InputError(f"{field}: expected a path, found {short_repr(value)}")

    @property
    def eval_batch(self) -> int:
        """Examples per batch of an evaluation: a microbatch, which is known to fit into memory."""
        return self.batch // self.optimization.accumulate

    def evaluates(self, step: int) -> bool:
        """Returns whether the run evaluates and saves after a step."""
        return step % self.eval_every == 0 or step == self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(TrainingConfig):
    """Options of the training of a target."""

    model: dict[str, Any]  # fields of `transformer.Config`
    tokenizer: str = ""  # path of a tokenizer; empty: one is trained
    # Options of early exits; None: the last layer alone is trained.
    layer_skip: LayerSkip | None = None


def check_name(field: str, value: object) -> None:
    """Raises InputError unless a value can be the name or the folder of a model."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise InputError(f"{field}: expected a name or a path, found {short_repr(value)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(TrainingConfig):
    """Options of the training of any drafter."""

    target: str = "pystdlib/target"  # name or folder of the target
    mixture: Mixture  # kinds of training text
    target_cache: TargetCache  # what to cache of the target
    cache: str = ""  # folder of that cache; empty: in the run's folder
    draft_eval: DraftEvalConfig  # evaluation by speculative sampling

    def __post_init__(self):
        super().__post_init__()
        check_name("target", self.target)
        self.mixture.check_fits(self.length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig(DrafterConfig):
    """Options of the distillation of a draft model."""

    # Fields of `transformer.Config`, without those that the target determines.
    model: dict[str, Any]
    objective: Objective  # training objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig(DrafterConfig):
    """Options of the training of a drafter of the target's features."""

    # `method`, a module of `spsjax.drafters`, and the options of its drafter.
    drafter: dict[str, Any]
    objective: FeatureObjective  # training objective
    mesh: FeaturesMesh  # numbers of devices
    steps: int = integer(10_000, 1)

    @property
    def depth(self) -> int:
        """Steps that an evaluation measures: those of the training, or K if that is more."""
        return max(self.objective.steps, self.draft_eval.num_speculative_tokens)

    def __post_init__(self):
        super().__post_init__()
        if self.mixture.draft:
            raise InputError(
                "mixture.draft: expected 0, as a drafter of features cannot generate text alone, "
                f"found {self.mixture.draft}"
            )
        store = self.target_cache.store
        if store == "top_k":
            raise InputError("target_cache.store: expected 'nothing' or 'states', found 'top_k'")
        if self.objective.target and store != "nothing":
            raise InputError(
                "target_cache.store: expected 'nothing', as the target is trained, too, "
                f"found {store!r}"
            )
        for field in ("every", "anchors"):
            if (value := getattr(self.objective, field)) > self.length:
                raise InputError(f"objective.{field}: expected at most the length, found {value}")
        if self.length <= self.depth + 1:
            raise InputError(
                "length: expected above objective.steps and draft_eval.num_speculative_tokens, "
                f"{self.depth}, by 2 or more, found {self.length}"
            )


def read(cls: type[TrainingConfig], values: Mapping[str, Any]) -> TrainingConfig:
    """Returns the tree of a config's values.

    Raises InputError for a wrong value. The message begins with the value's whole key.
    """
    sections = {}
    for field in dataclasses.fields(cls):
        section, options = _section(field), values.get(field.name)
        has_keys = section or typing.get_origin(field.type) is dict
        if field.name not in values or not has_keys:
            continue
        if not isinstance(options, Mapping):
            raise InputError(f"{field.name}: expected keys and values, found {short_repr(options)}")
        if section is None:
            continue
        # The schedule of the learning rate depends on the length of the run.
        more = {"steps": values.get("steps")} if section is OptimizerConfig else {}
        sections[field.name] = from_config.build_section(field.name, section, options, **more)
    return from_config.build("config", cls, {**values, **sections})


def default(cls: type[TrainingConfig], **changes) -> ConfigDict:
    """Returns the config of a training with the default of every field, and with changes."""
    config = ConfigDict(defaults(cls))
    config.update(changes)
    return config


def defaults(cls: type) -> dict[str, Any]:
    """Returns the defaults of a config's class as nested dicts, without fields that have none."""
    values = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            if field.default is not None:
                values[field.name] = field.default
        elif section := _section(field):
            values[field.name] = defaults(section)
    return values


def _section(field: dataclasses.Field) -> type | None:
    """Returns the class of a field that is a section of its own; None: it is a value."""
    types = typing.get_args(field.type) or (field.type,)
    return next((kind for kind in types if dataclasses.is_dataclass(kind)), None)
