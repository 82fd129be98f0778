"""Training of drafters that continue the target's features: from a config to a drafter's folder."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from spsjax import drafters, loading
from spsjax.drafters.features import FeatureDrafter
from spsjax.drafters.parallel import HeadsDrafter
from spsjax.errors import InputError, check_flag, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import distillation, draft_data, feature_losses
from spsjax.training import step as train_step
from spsjax.training.draft_evaluation import DraftEvalConfig, DraftEvaluator
from spsjax.training.target_cache import TargetCache
from spsjax.training.trainer import Trainer, TrainingCorpus
from spsjax.types import PyTree
from spsjax.utils import from_config, hashing

LAYERS = "eagle", "eagle3"


def default_config() -> ConfigDict:
    """Returns the options that drafters of features share, for the shipped target."""
    return ConfigDict(
        {
            "target": "pystdlib/target",
            "init": "",  # a drafter whose weights training begins with; empty: random ones
            "drafter": {
                "method": "eagle",
                "d_ff": 0,  # a size of 0 is the target's
                "num_heads": 0,
                "num_kv_heads": 0,
                "head_dim": 0,
            },
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "objective": {
                "steps": 1,
                "every": 1,
                "one": False,
                "decay": 1.0,
                "detached": False,
                "divergence": "forward_kl",
                "token": 1.0,
                "feature": 0.0,
                "top_k": 0.0,
                "noise": 0.0,
                "glance": 0.0,
                "target": 0.0,
            },
            "mixture": {
                "corpus": 1.0,
                "target": 0.0,
                "draft": 0.0,
                "samples": 1024,
                "batch": 16,
                "prompt_length": 32,
                "temperature": 1.0,
            },
            "target_cache": {"store": "states", "k": 64, "batch": 2},
            "cache": "",  # folder of the target cache; empty: in the run's folder
            "draft_eval": {
                "prompts": 16,
                "prompt_length": 32,
                "new_tokens": 64,
                "num_speculative_tokens": 4,
                "temperatures": (1.0, 0.0),
            },
            "length": 512,
            "batch": 2,
            "steps": 10_000,
            "optimization": {
                "learning_rate": 1e-3,
                "warmup": 100,
                "final_rate": 0.0,
                "weight_decay": 0.0,
                "clip": 1.0,
                "b1": 0.9,
                "b2": 0.95,
                "accumulate": 1,
            },
            "compute": {"dtype": "", "remat": False},
            # Every device holds the whole drafter, or a part of it by the target's rules.
            "mesh": {"data": 1, "model": 1, "replicate": True},
            "seed": 0,
            "eval_every": 1000,
            "eval_examples": 64,
            "log_every": 10,
            "keep": 2,
            "keep_best": 1,
        }
    )


@dataclasses.dataclass(frozen=True)
class _HeadSetup:
    """The checked sections of a config for `train_head`."""

    target: Model
    drafter: FeatureDrafter
    objective: feature_losses.FeatureObjective
    mixture: distillation.Mixture
    target_cache: TargetCache
    draft_eval: DraftEvalConfig
    initial: PyTree | None  # the drafter's parameters to begin with, its constants included

    @property
    def depth(self) -> int:
        """Steps that an evaluation judges: those of the training, and as many as are drafted."""
        return max(self.objective.steps, self.draft_eval.num_speculative_tokens)


def train_head(
    config: ConfigDict,
    workdir: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    export: str | None = None,
) -> LoadedDrafter:
    """Trains a drafter on a target's features, and the target with it if `objective.target`.

    Args:
        config: config as in `configs/drafters`.
        workdir: folder of the run, as for `train_target`.
        mesh: mesh of the target and of the batches; None for one device.
        export: checkpoint to turn into `drafter` instead of training: a step, "latest" or "best".

    Returns:
        The drafter. A target that was trained, too, is in the folder `model` of the run.

    Raises:
        InputError: config, target, corpus and mesh do not fit together.
        Stopped: the process received SIGTERM, and has saved a checkpoint.
        NonFiniteError: the loss or a weight is not finite.
    """
    trainer = Trainer(config, workdir, mesh, export)
    setup = _check_setup(config, trainer)
    target, drafter, objective = setup.target, setup.drafter, setup.objective
    corpus = trainer.prepare_corpus(target.tokenizer)
    pinned = {"target": target.params} | ({"init": setup.initial} if setup.initial else {})
    prints = {name: hashing.params_fingerprint(params) for name, params in pinned.items()}
    trainer.folder.pin(corpus=corpus.fingerprint, **prints)
    where = drafter.shardings(mesh, config.mesh.replicate)
    constants = _constants(drafter, corpus)
    if setup.initial:
        constants = {name: setup.initial[name] for name in constants}
    constants = sharding.place_params(constants, where)
    frozen = {"target": target.params, "drafter": constants}
    shapes = drafter.param_shapes(jnp.float32)
    shapes = {name: shape for name, shape in shapes.items() if name not in drafter.constants}
    shapes = sharding.place_shapes(shapes, where)
    target_shapes = jax.tree.map(_as_float32, target.params)

    def init_params(key, frozen) -> PyTree:
        params = drafter.from_target(drafter.init_params(key), frozen)
        return {name: params[name] for name in shapes}

    def first_params() -> PyTree:
        if setup.initial is None:
            params = train_step.random_params(init_params, shapes, config.seed, frozen)
        else:
            params = {name: setup.initial[name] for name in shapes}
            params = sharding.place_params(jax.tree.map(_to_float32, params), where)
        if not objective.target:
            return params
        return {"drafter": params, "target": jax.tree.map(_to_float32, target.params)}

    def pair_of(params: PyTree) -> tuple[Model, LoadedDrafter]:
        context, served = target.config.max_positions, target
        if objective.target:
            cast = jax.tree.map(
                lambda x, like: x.astype(like.dtype), params["target"], target.params
            )
            name = str(trainer.workdir / "model")
            params, served = params["drafter"], dataclasses.replace(target, name=name, params=cast)
        params = params | constants
        return served, LoadedDrafter("draft", drafter, params, context, corpus.tokenizer)

    params = trainer.run(
        f"{config.drafter.method} for {config.target}",
        {"drafter": shapes, "target": target_shapes} if objective.target else shapes,
        first_params,
        feature_losses.feature_metrics(drafter, objective, trainer.precision),
        frozen,
        draft_data.batches(
            trainer,
            corpus,
            target,
            setup.mixture,
            setup.target_cache,
            tap_layers=drafter.tap_layers,
            first=objective.steps + 1,
        ),
        _evaluator(setup, trainer, corpus, frozen, pair_of).evaluate,
        flops_per_token=_flops_per_token(setup, shapes),
    )
    served, trained = pair_of(params)
    if objective.target:
        print(
            f"The target was trained, too: its samples are not those of {config.target} any more."
        )
        trainer.save(target.config, params["target"], target.tokenizer)
    return trainer.save_drafter(trained, served)


def _flops_per_token(setup: _HeadSetup, shapes: PyTree) -> float:
    """Returns the floating-point operations per token, without the vocabulary's."""
    objective, target = setup.objective, transformer.num_params(setup.target.params)
    # Each head runs in one step only.
    alone = objective.one or isinstance(setup.drafter, HeadsDrafter)
    runs = 1 if alone else 1 + (objective.steps - 1) / objective.every
    passes = (setup.target_cache.store == "nothing") + 3 * bool(objective.target)
    return 6 * runs * transformer.num_params(shapes) + 2 * target * passes


def _to_float32(leaf: jax.Array) -> jax.Array:
    """Returns a copy: training gives its parameters' buffers away."""
    return jnp.array(leaf, jnp.float32, copy=True)


def _as_float32(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)


def _check_setup(config: ConfigDict, trainer: Trainer) -> _HeadSetup:
    """Returns the checked sections of a config; writes nothing."""
    build = from_config.build
    objective = build("objective", feature_losses.FeatureObjective, config.objective)
    mixture = build("mixture", distillation.Mixture, config.mixture)
    cache = build("target_cache", TargetCache, config.target_cache)
    draft_eval = build("draft_eval", DraftEvalConfig, config.draft_eval)
    if mixture.draft:
        raise InputError("mixture.draft: expected 0, as a head writes no texts alone")
    if cache.store == "top_k":
        raise InputError("target_cache.store: expected 'nothing' or 'states', found 'top_k'")
    target = loading.load(config.target, trainer.mesh, trainer.precision.dtype)
    if target.tokenizer is None:
        raise InputError(f"{config.target}: expected a tokenizer beside the weights, found none")
    drafter = build_drafter(config.drafter, target.config)
    trainer.check_length(target.config.max_positions)
    check_flag("mesh.replicate", config.mesh.replicate)
    drafter.shardings(trainer.mesh, config.mesh.replicate)
    if objective.target and cache.store != "nothing":
        raise InputError("target_cache.store: expected 'nothing', as the target is trained, too")
    initial = _initial(config.init, target, drafter) if config.init else None
    setup = _HeadSetup(target, drafter, objective, mixture, cache, draft_eval, initial)
    if drafter.max_steps is not None and setup.depth > drafter.max_steps:
        raise InputError(
            f"objective.steps, draft_eval.num_speculative_tokens: expected at most the drafter's "
            f"{drafter.max_steps} steps, found {setup.depth}"
        )
    if objective.steps < drafter.least_steps:
        raise InputError(
            f"objective.steps: expected at least {drafter.least_steps}, which train the whole "
            f"drafter, found {objective.steps}"
        )
    if objective.glance and not objective.steps == drafter.tokens_per_step > 1:
        raise InputError(
            "objective.glance: expected 0, unless objective.steps are the drafter's tokens per "
            f"step, and more than one, found {objective.glance}"
        )
    if objective.every > config.length:
        raise InputError(f"objective.every: expected at most the length, found {objective.every}")
    if config.length <= setup.depth + 1:
        raise InputError(
            f"length: expected above objective.steps and draft_eval.num_speculative_tokens, "
            f"{setup.depth}, by 2 or more, found {config.length}"
        )
    mixture.check_fits(config.length)
    draft_eval.check_fits(target.config.max_positions, config.length + 1, setup.depth + 1)
    return setup


def _initial(name: str, target: Model, drafter: FeatureDrafter) -> PyTree:
    """Returns the parameters of the drafter `name`; raises InputError if it has another shape."""
    loaded = loading.load_drafter(name, target)
    if type(loaded.drafter) is not type(drafter) or _sizes(loaded.drafter) != _sizes(drafter):
        raise InputError(
            f"init: expected a drafter of the shape in the config's section drafter, found "
            f"another one in {name}"
        )
    return loaded.params


def _sizes(drafter: FeatureDrafter) -> dict[str, object]:
    """Returns the fields of a drafter on which its weights depend."""
    drafts = "num_speculative_tokens", "tree"
    names = (field.name for field in dataclasses.fields(drafter))
    return {name: getattr(drafter, name) for name in names if name not in drafts}


def _evaluator(
    setup: _HeadSetup, trainer: Trainer, corpus: TrainingCorpus, frozen: PyTree, pair_of
) -> DraftEvaluator:
    """Returns the evaluator of the drafter on the held-out examples, without noise."""
    objective = dataclasses.replace(setup.objective, noise=0.0, glance=0.0, every=1, one=False)
    return DraftEvaluator(
        setup.draft_eval,
        functools.partial(
            feature_losses.feature_metrics,
            setup.drafter,
            objective,
            trainer.precision,
            depth=setup.depth,
        ),
        frozen,
        pair_of,
        corpus.held_out,
        setup.depth + 1,
        trainer.eval_batch,
        trainer.batch_sharding,
        trainer.report,
    )


def build_drafter(options: ConfigDict, target: transformer.Config) -> FeatureDrafter:
    """Returns the drafter that the section `drafter` of a config describes.

    Sizes of the layer that are 0 or missing are the target's.
    """
    options = dict(options)
    for field in ("config", "target", "tree", "num_speculative_tokens"):
        if field in options:
            raise InputError(
                f"drafter: expected no {field}, which training does not have, found one"
            )
    method, methods = options.pop("method", None), drafters.methods_with("from_config")
    if method not in methods:
        expected = ", ".join(methods)
        raise InputError(f"drafter.method: expected {expected}, found {short_repr(method)}")
    return methods[method].from_config(options, target)


def _constants(drafter: FeatureDrafter, corpus: TrainingCorpus) -> PyTree:
    """Returns the parameters that are not trained: the most frequent tokens of the corpus."""
    if not drafter.constants:
        return {}
    counts = np.zeros(drafter.target.vocab_size, np.int64)
    for start in range(0, len(corpus.train), 1024):
        rows = corpus.train[np.arange(start, min(start + 1024, len(corpus.train)))]
        counts += np.bincount(rows.ravel(), minlength=len(counts))
    frequent = np.argsort(-counts, kind="stable")[: drafter.vocab_size]
    (name,) = drafter.constants
    return {name: np.sort(frequent).astype(np.int32)}
