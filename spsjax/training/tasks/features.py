"""The task of training a drafter of the target's features, alone or with the target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import drafters, loading
from spsjax.data import pipeline
from spsjax.drafters.features import FeatureDrafter
from spsjax.errors import InputError, did_you_mean, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import feature_losses
from spsjax.training import step as train_step
from spsjax.training.config import FeaturesConfig
from spsjax.training.tasks import base
from spsjax.training.tasks.drafter import DrafterTask
from spsjax.types import PyTree
from spsjax.utils import from_config


class FeaturesTask(DrafterTask):
    """A drafter of the target's features, and the target with it if `objective.target`.

    Trained parameters are the drafter's, or `drafter` and `target` if the target is trained, too.
    """

    config_class = FeaturesConfig

    def __init__(self, config: FeaturesConfig, mesh):
        super().__init__(config, mesh)
        context, replicate = self.target.config.max_positions, config.mesh.replicate
        self.drafter = build_drafter(config.drafter, self.target.config)
        base.check_length(config, context)
        self._sharding_of = self.drafter.shardings(mesh, replicate)
        self._initial = self._read_initial() if config.init else None
        self._check_objective()
        config.draft_eval.check_fits(context, config.length + 1, config.depth + 1)
        self.title = f"{config.drafter['method']} for {config.target}"
        self.tap_layers = self.drafter.tap_layers
        self.skipped, self.evaluated_from = config.objective.steps + 1, config.depth + 1
        self.loss = feature_losses.feature_metrics(self.drafter, config.objective, config.compute)

    def _check_objective(self) -> None:
        """Raises InputError if the objective does not fit the drafter."""
        drafter, depth, objective = self.drafter, self.config.depth, self.config.objective
        if drafter.max_steps is not None and depth > drafter.max_steps:
            raise InputError(
                "objective.steps, draft_eval.num_speculative_tokens: expected at most the "
                f"drafter's {drafter.max_steps} steps, found {depth}"
            )
        if objective.steps < drafter.least_steps:
            raise InputError(
                f"objective.steps: expected at least {drafter.least_steps}, which train the whole "
                f"drafter, found {objective.steps}"
            )
        if objective.glance and not objective.steps == drafter.tokens_per_step > 1:
            raise InputError(
                "objective.glance: expected 0, unless objective.steps are the drafter's tokens "
                f"per step, and more than one, found {objective.glance}"
            )

    def _read_initial(self) -> PyTree:
        """Returns the parameters of the drafter `init`, its constants included.

        Raises InputError if it has another shape.
        """
        loaded = loading.load_drafter(self.config.init, self.target)
        same_class = type(loaded.drafter) is type(self.drafter)
        if not same_class or _sizes(loaded.drafter) != _sizes(self.drafter):
            raise InputError(
                "init: expected a drafter of the shape in the config's section drafter, found "
                f"another one in {self.config.init}"
            )
        return loaded.params

    def pinned(self):
        return super().pinned() | ({"init": self._initial} if self._initial else {})

    def start(self, run):
        names, constants = self.drafter.constants, {}
        if names and self._initial:
            constants = {name: self._initial[name] for name in names}
        elif names:
            counts_V = counts_of(run.train, self.target.config.vocab_size)
            constants = self.drafter.constants_from(counts_V)
        self._constants = sharding.shard_params(constants, self._sharding_of)
        self.frozen = {"target": self.target.params, "drafter": self._constants}
        shapes = self.drafter.param_shapes(jnp.float32)
        shapes = {name: shape for name, shape in shapes.items() if name not in names}
        self._own_shapes = self.shapes = sharding.shard_shapes(shapes, self._sharding_of)
        if self.config.objective.target:
            target = jax.tree.map(_as_float32, self.target.params)
            self.shapes = {"drafter": self._own_shapes, "target": target}
        super().start(run)

    def init(self):
        if self._initial is None:
            params = train_step.random_params(
                self._random, self._own_shapes, self.config.seed, self.frozen
            )
        else:
            params = {name: self._initial[name] for name in self._own_shapes}
            params = jax.tree.map(_to_float32, params)
            params = sharding.shard_params(params, self._sharding_of)
        if not self.config.objective.target:
            return params
        return {"drafter": params, "target": jax.tree.map(_to_float32, self.target.params)}

    def _random(self, key, frozen) -> PyTree:
        params = self.drafter.from_target(self.drafter.init_params(key), frozen)
        return {name: params[name] for name in self._own_shapes}

    def metrics_at(self, temperature):
        """Returns the metrics function of evaluations: of every step and draft, without noise."""
        plain = {"noise": 0, "glance": 0, "every": 1, "one": False, "anchors": 0, "pace": 0}
        objective = dataclasses.replace(self.config.objective, **plain)
        options = self.config.compute, temperature, self.config.depth
        return feature_losses.feature_metrics(self.drafter, objective, *options)

    def pair(self, params):
        target, context = self.target, self.target.config.max_positions
        if self.config.objective.target:
            cast = jax.tree.map(
                lambda x, like: x.astype(like.dtype), params["target"], target.params
            )
            name = str(self.run.folder.path / "model")
            params, target = params["drafter"], dataclasses.replace(target, name=name, params=cast)
        params = params | self._constants
        return target, LoadedDrafter("draft", self.drafter, params, context, self.tokenizer)

    def flops_per_token(self):
        """Returns the floating-point operations per training token, without the vocabulary's."""
        objective, target = self.config.objective, transformer.num_params(self.target.params)
        first, later = 1, 1 / objective.every
        if objective.anchors:
            first = later = objective.anchors / self.config.length
        runs = self.drafter.training_passes(1 if objective.one else objective.steps, first, later)
        passes = (self.config.target_cache.store == "nothing") + 3 * bool(objective.target)
        return 6 * runs * transformer.num_params(self._own_shapes) + 2 * target * passes

    def export(self, params):
        target, trained = self.pair(params)
        if self.config.objective.target:
            print(
                "The target was trained, too: its samples are not those of "
                f"{self.config.target} any more."
            )
            config, tokenizer = self.target.config, self.tokenizer
            self.run.save_model(Model("trained", config, params["target"], tokenizer, self.mesh))
        self.run.save_drafter(trained, target)
        return trained


def build_drafter(options: dict, target: transformer.Config) -> FeatureDrafter:
    """Returns the drafter that the section `drafter` of a config describes.

    Sizes of the layer that are 0 or missing are the target's.
    """
    options = dict(options)
    for field in ("config", "target", "tree", "num_speculative_tokens"):
        if field in options:
            raise InputError(
                f"drafter.{field}: expected none, because training does not have it, found one"
            )
    method, methods = options.pop("method", None), drafters.methods_with("LAYOUT")
    if method not in methods:
        expected = ", ".join(methods)
        raise InputError(
            f"drafter.method: expected {expected}, found {short_repr(method)}"
            f"{did_you_mean(str(method), methods)}"
        )
    with from_config.whole_keys("drafter", options):
        return methods[method].Drafter.from_config(options, target)


def _sizes(drafter: FeatureDrafter) -> dict[str, object]:
    """Returns the fields of a drafter on which its weights depend."""
    drafts = "num_speculative_tokens", "tree"
    names = (field.name for field in dataclasses.fields(drafter))
    return {name: getattr(drafter, name) for name in names if name not in drafts}


def counts_of(examples: pipeline.TokenWindows, vocab_size: int) -> np.ndarray:
    """Returns the frequencies [V] of the tokens that count in examples: those to be drafted."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(examples), 1024):
        rows = np.arange(start, min(start + 1024, len(examples)))
        tokens = examples[rows]
        if examples.mask is not None:
            tokens = tokens[examples.mask[rows] > 0]
        counts += np.bincount(tokens.ravel(), minlength=vocab_size)
    return counts


def _to_float32(leaf: jax.Array) -> jax.Array:
    """Returns a float32 copy, because training consumes the buffers of its parameters."""
    return jnp.array(leaf, jnp.float32, copy=True)


def _as_float32(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
