"""A training as every recipe has it: a config's parts, checked, and the run made of them."""

import dataclasses
import hashlib
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from spsjax import loading, request
from spsjax.data import corpus, documents, pipeline
from spsjax.errors import InputError, short_repr
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import multihost, sharding
from spsjax.tokenization import Tokenizer
from spsjax.training import loop, run_folder
from spsjax.training import step as train_step
from spsjax.training.checkpoints import Checkpoints
from spsjax.types import PyTree
from spsjax.utils import from_config


class Recipe:
    """What all trainings share: a config's parts, checked, and a run of them.

    Args:
        config: as in `configs/experiments`.
        workdir: where the run is kept; one that is there already goes on.
        mesh: of the weights and batches.
        export: the checkpoint to make the model, instead of training.
    """

    def __init__(self, config: ConfigDict, workdir: str | pathlib.Path, mesh, export: str | None):
        build = from_config.build
        self.config, self.mesh, self.export = config, mesh, export
        self.pace = build(
            "config",
            loop.Pace,
            {name: config[name] for name in ("steps", "eval_every", "log_every")},
        )
        self.optimization = build(
            "optimization", train_step.Optimization, config.optimization, steps=config.steps
        )
        self.compute = build("compute", train_step.Compute, config.compute)
        self.sources = build("data", documents.Sources, config.data)
        train_step.check_batch(config.batch, self.optimization.accumulate, mesh)
        if type(config.eval_examples) is not int or config.eval_examples < 1:
            raise InputError(f"eval_examples: expected at least 1, found {config.eval_examples!r}")
        request.check_seed(config.seed)
        if type(config.length) is not int or config.length < 1:
            raise InputError(f"length: expected an integer >= 1, found {short_repr(config.length)}")
        for field in ("tokenizer", "init", "cache"):
            value = config.get(field, "")
            if not isinstance(value, str) or "\0" in value:
                raise InputError(f"{field}: expected a path, found {short_repr(value)}")
        self.place = sharding.batch_sharding(mesh)
        self.rows = config.batch // self.optimization.accumulate  # what fits into memory at once
        self.last = {}
        self.workdir = pathlib.Path(workdir)
        self.folder = run_folder.Folder(workdir, config)
        if export is not None and not self.folder.begun:
            raise InputError(f"{self.folder.path}: expected a run to export from, found none")
        self.cache = pathlib.Path(config.get("cache") or self.folder.path / "cache")

    def examples(self, pieces: Tokenizer | None, vocab_size: int | None = None):
        """Training examples, held-out ones, and the tokenizer; and a name of what they are made of.

        The corpus is part of the run: made anew from other texts, it would go on as another.
        """

        def prepare():
            return corpus.prepare(
                self.folder.path / "data", self.sources, self.config.length, pieces, vocab_size,
                replace=not self.folder.begun,
            )  # fmt: skip

        self.folder.hold()
        if multihost.is_main_process():
            prepare()
        multihost.barrier("corpus prepared")
        training, held_out, pieces = prepare()
        manifest = json.loads((self.folder.path / "data" / "manifest.json").read_text("utf-8"))
        multihost.check_same_everywhere(manifest)
        manifest.pop("listing", None)  # of times, too, which make no difference
        made_of = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
        parts = manifest["parts"]
        print(
            f"{parts['train']['tokens']:,} training tokens in {parts['train']['documents']:,} "
            f"documents, {parts['held_out']['tokens']:,} in {parts['held_out']['documents']:,} "
            "held out"
        )
        return training, held_out, pieces, made_of

    def same_pieces(self, given: Tokenizer | None) -> Tokenizer | None:
        """The tokenizer of the folder to begin with, if there is one.

        Raises InputError where another one is given: the weights would mean other texts.
        """
        found = loading.load_tokenizer(self.config.init) if self.config.init else None
        if given is None or found is None:
            return given or found
        if given != found:
            raise InputError(
                f"init: expected a model with the tokenizer in {given.path.parent}, "
                f"found another one in {self.config.init}"
            )
        return given

    def some(self, held_out: pipeline.Windows) -> np.ndarray:
        """Held-out examples to evaluate on: as many as asked for, from all over the text."""
        count = min(self.config.eval_examples, len(held_out))
        return held_out[np.arange(count) * len(held_out) // count]

    def initial(self, model: transformer.Config) -> PyTree:
        """Parameters and optimiser state to begin with: random, or those of a folder."""
        init = self.config.init
        params = loading.load(init, self.mesh, dtype="float32").params if init else None
        return train_step.initial(model, self.optimization, self.mesh, self.config.seed, params)

    def check(self, model: transformer.Config) -> None:
        """Raises InputError where length, mesh or the folder to begin with do not fit the model."""
        length = self.config.length
        if length > model.max_positions:
            raise InputError(
                f"length: expected at most the context, {model.max_positions}, found {length}"
            )
        if self.mesh is not None:
            sharding.check_divides(self.mesh, model)
        found = loading.load_config(self.config.init) if self.config.init else model
        for field in dataclasses.fields(model):
            wanted, other = getattr(model, field.name), getattr(found, field.name)
            if wanted != other and field.name not in ("bos_id", "eos_ids"):
                raise InputError(
                    f"init: expected a model with {field.name}={wanted}, found {other} in "
                    f"{self.config.init}"
                )

    def run(
        self, model: transformer.Config, pieces: Tokenizer, values: train_step.Values, frozen, feed,
        evaluate, change=None, frozen_params: int = 0,
    ) -> Model:  # fmt: skip
        """The training itself, then the model folder and the plot."""
        shapes = train_step.shapes(model, self.optimization, self.mesh)
        count = transformer.num_params(shapes["params"])
        print(f"{count:,} parameters")
        with sharding.use_mesh(self.mesh), self.checkpoints() as checkpoints:
            if self.export is not None:
                state = self.exported(checkpoints, shapes)
                return self.save(model, state["params"], pieces)
            tokens = self.config.batch * self.config.length
            mixing = model.num_layers * model.num_heads * model.head_dim * self.config.length
            flops = 6 * (count + mixing) + 2 * frozen_params
            state = loop.fit(
                self.folder, checkpoints, self.pace, shapes, lambda: self.initial(model),
                train_step.step(values, self.optimization), frozen, feed, evaluate, change, tokens,
                flops * tokens,
            )  # fmt: skip
            best = checkpoints.best()
        for line in self.last.values():
            print(line)
        if best not in (None, self.pace.steps):
            print(f"the best checkpoint is that of step {best}: --export={best} makes it the model")
        drawn = run_folder.plot(self.folder)
        curves = self.workdir / "curves.png"
        print(f"curves in {curves}" if drawn else "no curves: matplotlib is not installed")
        return self.save(model, state["params"], pieces)

    def exported(self, checkpoints: Checkpoints, shapes: PyTree) -> PyTree:
        """The state of the checkpoint that was asked for."""
        named = {"best": checkpoints.best(), "latest": max(checkpoints.steps(), default=None)}
        step = named.get(self.export, self.export)
        if not str(step).isdecimal() or len(str(step)) > 18:
            raise InputError(
                "export: expected a step, 'best' or 'latest' of a run with checkpoints, "
                f"found {short_repr(self.export)}"
            )
        print(f"checkpoint of step {step}")
        return checkpoints.read(int(step), shapes)

    def checkpoints(self) -> Checkpoints:
        """Of this run."""
        path = self.folder.path / "checkpoints"
        return Checkpoints(path, self.config.keep, self.config.keep_best)

    def save(self, model: transformer.Config, params: PyTree, pieces: Tokenizer) -> Model:
        """The model folder, in the Hugging Face layout."""
        trained = Model("trained", model, params, pieces, self.mesh)
        halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        whole = dataclasses.replace(trained, params=multihost.to_host(halves))
        if multihost.is_main_process():
            loading.save(self.folder.path / "model", whole)
        multihost.barrier("model saved")
        print(f"model in {self.workdir / 'model'}")
        return trained

    def report(self, step: int, group: str, record: dict) -> None:
        """Logs a measurement; the last of each group is printed when the run ends."""
        self.folder.log(step, group, **record)
        shown = [
            f"{name} {value['mean']:.4f} ± {value['interval'] or math.nan:.4f}"
            if isinstance(value, dict)
            else f"{name} {value:.4f}"
            for name, value in record.items()
        ]
        self.last[group] = f"{group}: {', '.join(shown)}"
