"""A training run from its config: checks, corpus, training and the model folder."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from spsjax import loading, request
from spsjax.data import corpus, documents, pipeline
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import transformer
from spsjax.parallel import multihost, sharding
from spsjax.tokenization import Tokenizer
from spsjax.training import loop, metrics, plots, run_folder
from spsjax.training import step as train_step
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.optimizer import OptimizerConfig
from spsjax.types import PyTree
from spsjax.utils import atomic_files, from_config

# Config keys that may change when a run is resumed: they do not affect results beyond rounding.
_FREE_KEYS = "mesh", "cache", "keep", "keep_best", "log_every"
# What a run writes into its folder as folders.
_FOLDERS = "checkpoints", "damaged", "data", "drafter", "model"


@dataclasses.dataclass(frozen=True)
class TrainingCorpus:
    """The tokenized corpus of a run.

    Attributes:
        train: training examples.
        held_out: held-out examples, evenly spaced, as many as the config asks for.
        tokenizer: tokenizer of the corpus.
        fingerprint: hash of texts, split and tokenizer.
    """

    train: pipeline.TokenWindows
    held_out: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str


class Trainer:
    """The part of a training run that does not depend on what is trained.

    Args:
        config: config as in `configs/experiments`.
        workdir: folder of the run. A run that it already holds is resumed.
        mesh: mesh of weights and batches; None for one device.
        export: checkpoint to turn into the model instead of training: a step, "latest" or "best".

    Raises:
        InputError: an option is invalid, or the folder holds a run with another config.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: str | pathlib.Path,
        mesh: jax.sharding.Mesh | None = None,
        export: str | None = None,
    ):
        build = from_config.build
        self.config, self.mesh, self.export = config, mesh, export
        intervals = {name: config[name] for name in ("steps", "eval_every", "log_every")}
        self.intervals = build("config", loop.Intervals, intervals)
        self.optimizer = build(
            "optimization", OptimizerConfig, config.optimization, steps=config.steps
        )
        self.precision = build("compute", train_step.Precision, config.compute)
        self.sources = build("data", documents.Sources, config.data)
        train_step.check_batch(config.batch, self.optimizer.accumulate, mesh)
        check_integer("eval_examples", config.eval_examples, 1)
        check_integer("length", config.length, 1)
        request.check_seed(config.seed)
        for field in ("tokenizer", "init", "cache"):
            value = config.get(field, "")
            if not isinstance(value, str) or "\0" in value:
                raise InputError(f"{field}: expected a path, found {short_repr(value)}")
        self.batch_sharding = sharding.batch_sharding(mesh)
        # A microbatch is known to fit into memory, so that evaluation uses its size.
        self.eval_batch = config.batch // self.optimizer.accumulate
        self.workdir = pathlib.Path(workdir)
        self.folder = run_folder.Folder(workdir, config, _FREE_KEYS)
        self.cache = pathlib.Path(config.get("cache") or self.folder.path / "cache")
        self._last_reports: dict[str, str] = {}
        folders = (self.cache, *map(self.folder.path.joinpath, _FOLDERS))
        models = (f"{folder}/{name}" for folder in _FOLDERS[-2:] for name in loading.FILES)
        files = (plots.FILE, *models)
        atomic_files.check_outputs(map(self.folder.path.joinpath, files), folders)
        if export is not None and not self.folder.resumable:
            raise InputError(f"{self.folder.path}: expected a run to export from, found none")

    def check_length(self, context: int) -> None:
        """Raises InputError if the texts are longer than a model's context."""
        if self.config.length > context:
            raise InputError(
                f"length: expected at most the context, {context}, found {self.config.length}"
            )

    def check_model(self, model: transformer.Config) -> None:
        """Raises InputError if the length, the mesh or the initial model do not fit the model."""
        self.check_length(model.max_positions)
        if self.mesh is not None:
            sharding.check_divides(self.mesh, model)
        if not self.config.get("init"):
            return
        initial, free = loading.load_config(self.config.init), {"bos_id", "eos_ids"}
        if model.positions == "rotary":  # no weight depends on them: a context may become longer
            free |= {"max_positions", "rope_theta", "rope_theta_local", "rope_scaling"}
        for field in dataclasses.fields(model):
            wanted, value = getattr(model, field.name), getattr(initial, field.name)
            fits = wanted == value or field.name in free
            divisor = ""
            if field.name == "num_layers":
                # A repeated layer has the same window as the one that was trained.
                period = len(model.windows) or 1
                fits = wanted == value or (wanted % value == 0 and value % period == 0)
                divisor = " or a divisor of it" + f" by {period}" * (period > 1)
            if not fits:
                raise InputError(
                    f"init: expected a model with {field.name}={wanted}{divisor}, found {value} in "
                    f"{self.config.init}"
                )

    def choose_tokenizer(self, tokenizer: Tokenizer | None) -> Tokenizer | None:
        """Returns `tokenizer`, or that of the initial model if it is None and there is one.

        Raises InputError if both exist and differ: the weights would be read with other tokens.
        """
        init = self.config.get("init")
        initial = loading.load_tokenizer(init) if init else None
        if tokenizer is not None and initial is not None and tokenizer != initial:
            raise InputError(
                f"init: expected a model with the tokenizer in {tokenizer.path.parent}, "
                f"found another one in {init}"
            )
        return initial if tokenizer is None else tokenizer

    def prepare_corpus(
        self, tokenizer: Tokenizer | None, vocab_size: int | None = None
    ) -> TrainingCorpus:
        """Tokenizes the corpus in the run folder, or reads it if the run has one.

        Args:
            tokenizer: tokenizer; None trains one on the training split.
            vocab_size: vocabulary size of a tokenizer to train.
        """
        path = self.folder.path / "data"
        prepare = functools.partial(
            corpus.prepare,
            path,
            self.sources,
            self.config.length,
            tokenizer,
            vocab_size,
            # A run that already trained on a corpus must not resume with another one.
            replace=not self.folder.resumable,
        )
        self.folder.lock()
        if multihost.is_main_process():
            prepare()
        multihost.barrier("corpus prepared")
        train, held_out, tokenizer = prepare()
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
        multihost.check_same_everywhere(manifest)
        manifest.pop("listing", None)  # it depends on modification times, the corpus does not
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        splits = manifest["splits"]
        print(
            f"{splits['train']['tokens']:,} training tokens in {splits['train']['documents']:,} "
            f"documents, {splits['held_out']['tokens']:,} in {splits['held_out']['documents']:,} "
            "held out"
        )
        rows = metrics.evenly_spaced(self.config.eval_examples, len(held_out))
        return TrainingCorpus(train, held_out[rows], tokenizer, digest[:16])

    def init_model(self, model: transformer.Config, shapes: PyTree) -> PyTree:
        """Returns a model's initial parameters: random, or those of the folder `config.init`.

        A shallower initial model's layers are repeated (Du et al. 2024, arXiv 2405.15319).
        """
        if self.config.init:
            params = loading.load(self.config.init, self.mesh, dtype="float32").params
            return transformer.repeat_layers(params, model.num_layers)
        init = functools.partial(transformer.init, model)
        return train_step.random_params(init, shapes, self.config.seed)

    def run(
        self,
        title: str,
        shapes: PyTree,
        init_params: Callable[[], PyTree],
        metrics_of: train_step.PerTokenMetrics,
        frozen: PyTree,
        batches: pipeline.BatchIterator,
        evaluate: Callable[[int, PyTree], float],
        replace_batch: Callable[[int, PyTree, PyTree], PyTree] | None = None,
        flops_per_token: float = 0.0,
    ) -> PyTree:
        """Trains, or reads the checkpoint to export, and returns the parameters.

        Args:
            title: description of the model, for the output.
            shapes: shapes of the parameters, with shardings.
            init_params: creates the initial parameters.
            metrics_of: metrics function whose "loss" is minimised.
            frozen: arrays that are not trained.
            batches, evaluate, replace_batch: arguments of `loop.train_loop`.
            flops_per_token: floating-point operations per training token.
        """
        state_shapes = train_step.state_shapes(shapes, self.optimizer)
        sources = ", ".join(self.sources.train)
        print(f"{title}: {transformer.num_params(shapes):,} parameters, trained on {sources}")
        path = self.folder.path / "checkpoints"
        with (
            sharding.use_mesh(self.mesh),
            Checkpoints(path, self.config.keep, self.config.keep_best) as checkpoints,
        ):
            if self.export is not None:
                return self._read_export(checkpoints, state_shapes)["params"]
            tokens = self.config.batch * self.config.length
            state = loop.train_loop(
                self.folder,
                checkpoints,
                self.intervals,
                shapes=state_shapes,
                init_state=lambda: train_step.init_state(
                    init_params(), state_shapes, self.optimizer
                ),
                train_step=train_step.make_step(metrics_of, self.optimizer),
                frozen=frozen,
                batches=batches,
                evaluate=evaluate,
                replace_batch=replace_batch,
                tokens=tokens,
                flops=flops_per_token * tokens,
            )
            best = checkpoints.best()
        self._print_results(best)
        return state["params"]

    def save(self, model: transformer.Config, params: PyTree, tokenizer: Tokenizer) -> Model:
        """Writes the model folder in the Hugging Face layout, then the curves of a training.

        Returns the model.
        """
        trained = Model("trained", model, params, tokenizer, self.mesh)
        # Cast on the devices: half as many bytes travel to the host.
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        on_host = dataclasses.replace(trained, params=multihost.to_host(rounded))
        if multihost.is_main_process():
            loading.save(self.folder.path / "model", on_host)
        self._report_saved("model")
        return trained

    def save_drafter(self, drafter: LoadedDrafter, target: Model) -> LoadedDrafter:
        """Writes the folder of a drafter with weights of its own, then the curves of a training.

        Returns the drafter.
        """
        on_host = dataclasses.replace(drafter, params=multihost.to_host(drafter.params))
        if multihost.is_main_process():
            loading.save_drafter(self.folder.path / "drafter", on_host, target)
        self._report_saved("drafter")
        return drafter

    def _report_saved(self, name: str) -> None:
        """Prints where the result is, and draws the curves of a training."""
        multihost.barrier(f"{name} saved")
        print(f"{name} in {self.workdir / name}")
        if self.export is None:
            obstacle = plots.plot_curves(self.folder.path)
            curves = f"curves in {self.workdir / plots.FILE}"
            print(f"no curves: {obstacle}" if obstacle else curves)

    def report(self, step: int, group: str, record: dict) -> None:
        """Logs a measurement. The last one of each group is printed when the run ends."""
        self.folder.log(step, group, **record)
        texts = [
            f"{name} {metrics.with_interval(value['mean'], value['interval'], 4)}"
            if isinstance(value, dict)
            else f"{name} {value:.4f}"
            for name, value in record.items()
        ]
        self._last_reports[group] = f"{group}: {', '.join(texts)}"

    def _read_export(self, checkpoints: Checkpoints, shapes: PyTree) -> PyTree:
        """Returns the state of the checkpoint that `export` names."""
        steps = {"best": checkpoints.best(), "latest": max(checkpoints.steps(), default=None)}
        step = steps.get(self.export, self.export)
        if not str(step).isdecimal() or len(str(step)) > 18:
            raise InputError(
                "export: expected a step, 'best' or 'latest' of a run with checkpoints, "
                f"found {short_repr(self.export)}"
            )
        print(f"checkpoint of step {step}")
        return checkpoints.read(int(step), shapes)

    def _print_results(self, best_step: int | None) -> None:
        """Prints the last measurements, and which checkpoint is the best."""
        for line in self._last_reports.values():
            print(line)
        if best_step not in (None, self.intervals.steps):
            print(f"best checkpoint: step {best_step}. --export={best_step} makes it the model")


def flops_per_token(
    model: transformer.Config, num_params: int, length: int, frozen_params: int = 0
) -> float:
    """Returns the floating-point operations per training token.

    A forward pass takes 2 operations per parameter and token, a backward pass twice as many.
    Attention adds the scores and the weighted sum over, on average, half of the sequence.

    Args:
        model: shape of the trained model.
        num_params: number of its parameters.
        length: tokens per example.
        frozen_params: number of parameters of a model that only runs forward.
    """
    attention = model.num_layers * model.num_heads * model.head_dim * length
    return 6 * (num_params + attention) + 2 * frozen_params
