"""Training from a config to a folder: `fit` runs any task, and resumes what was interrupted."""

import pathlib
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from spsjax.errors import InputError, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import config as configs
from spsjax.training import contrib, loop, plots
from spsjax.training import step as train_step
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.run import Run
from spsjax.training.run_folder import Folder
from spsjax.training.tasks.base import Task
from spsjax.training.tasks.draft import DraftTask
from spsjax.training.tasks.features import FeaturesTask
from spsjax.training.tasks.target import TargetTask
from spsjax.types import PyTree
from spsjax.utils import hashing

# Tasks by a section that only their configs have, the most special first.
TASKS: dict[str, type[Task]] = {
    "drafter": FeaturesTask,
    "objective": DraftTask,
    "model": TargetTask,
}
# Config keys that may change when a run is resumed: they do not affect results beyond rounding.
_FREE_KEYS = "mesh", "cache", "keep", "keep_best", "log_every"


def train(
    config: ConfigDict,
    workdir: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    export: str | None = None,
) -> object:
    """Trains what a config describes; the same call resumes an interrupted run.

    A config with the section `drafter` trains a drafter of the target's features, one with
    `objective` and no `drafter` a draft model, and one with `model` alone a target. Modules of
    `spsjax.training.contrib` add sections of their own.

    Args:
        config: config as in `configs/experiments` and `configs/drafters`.
        workdir: folder of the run. It receives corpus, checkpoints, logs, curves and the result.
        mesh: mesh of all models and of batches; None for one device.
        export: checkpoint to turn into the result instead of training: a step, "latest" or "best".

    Returns:
        The trained `Model` or `LoadedDrafter`, or what a module of `contrib` trains.

    Raises:
        InputError: config, target, corpus and mesh do not fit together. No step was run.
        Stopped: the process received SIGTERM, and has saved a checkpoint.
        NonFiniteError: the loss or a weight is not finite.
    """
    if not any(section in config for section in TASKS):
        for section, module in contrib.by_section().items():
            if section in config:
                return module.train(config.to_dict(), workdir, mesh, export)
    return fit(*prepare(config, workdir, mesh), export)


def prepare(
    config: ConfigDict, workdir: str | pathlib.Path, mesh: jax.sharding.Mesh | None = None
) -> tuple[Task, configs.TrainingConfig, Folder]:
    """Returns the arguments of `fit`. It checks the config, loads the target, and writes nothing.

    Raises:
        InputError: config, target and mesh do not fit together, or the folder holds a run with
            another config.
    """
    values, task = config.to_dict(), task_class(config)
    options = configs.read(task.config_class, values)
    train_step.check_batch(options.batch, options.optimization.accumulate, mesh)
    folder = Folder(workdir, values, _FREE_KEYS, configs.defaults(task.config_class))
    return task(options, mesh), options, folder


def task_class(config: Mapping[str, object]) -> type[Task]:
    """Returns the task of a config; raises InputError if it describes none."""
    for section, task in TASKS.items():
        if section in config:
            return task
    sections = " or ".join((*TASKS, *contrib.by_section()))
    raise InputError(f"config: expected a section {sections}, found none")


def fit(
    task: Task, config: configs.TrainingConfig, folder: Folder, export: str | None = None
) -> Model | LoadedDrafter:
    """Trains a task in a folder, or reads the checkpoint `export`; returns the result."""
    if export is not None and not folder.resumable:
        raise InputError(f"{folder.path}: expected a run to export from, found none")
    run = Run(config, folder, task.mesh, task.tokenizer, task.vocab_size, task.ends)
    task.start(run)
    prints = {name: hashing.params_fingerprint(params) for name, params in task.pinned().items()}
    folder.pin(corpus=run.fingerprint, **prints)
    sources, count = ", ".join(config.data.train), transformer.num_params(task.shapes)
    print(f"{task.title}: {count:,} parameters, trained on {sources}")
    optimizer = config.optimization
    shapes = train_step.state_shapes(task.shapes, optimizer)
    batches = task.batches() if export is None else None
    path = folder.path / "checkpoints"
    with (
        sharding.use_mesh(task.mesh),
        Checkpoints(path, config.keep, config.keep_best) as checkpoints,
    ):
        if export is None:

            def first():
                return train_step.init_state(task.init(), shapes, optimizer)

            step = train_step.make_step(task.loss, optimizer)
            state = loop.train_loop(task, config, folder, checkpoints, shapes, first, step, batches)
            run.print_results(checkpoints.best())
        else:
            state = _read_checkpoint(export, checkpoints, shapes)
    result = task.export(state["params"])
    if export is None:
        obstacle = plots.plot_curves(folder.path)
        print(f"no curves: {obstacle}" if obstacle else f"curves in {folder.name / plots.FILE}")
    return result


def _read_checkpoint(export: str, checkpoints: Checkpoints, shapes: PyTree) -> PyTree:
    """Returns the state of the checkpoint that `export` names."""
    steps = {"best": checkpoints.best(), "latest": max(checkpoints.steps(), default=None)}
    step = steps.get(export, export)
    if not str(step).isdecimal() or len(str(step)) > 18:
        raise InputError(
            "export: expected a step, 'best' or 'latest' of a run with checkpoints, "
            f"found {short_repr(export)}"
        )
    print(f"checkpoint of step {step}")
    return checkpoints.read(int(step), shapes)
