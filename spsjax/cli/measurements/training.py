"""Cost of a training token, by drafter."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import cast

import jax.numpy as jnp
from ml_collections import ConfigDict

from spsjax.benchmarks import report
from spsjax.cli import configs, terminal
from spsjax.cli.measurements import plot
from spsjax.errors import InputError, check_integer, did_you_mean, one_line, short_repr
from spsjax.planning import hardware
from spsjax.training import cost, fit
from spsjax.training.tasks.drafter import DrafterTask


def run(config: ConfigDict, workdir: pathlib.Path, folder: pathlib.Path) -> str:
    """Times the trainings of a config like configs/experiments/training_cost.py.

    Args:
        config: the config.
        workdir: folder of the table, and of a corpus per drafter.
        folder: folder of the drafters' configs.

    Returns:
        the table.
    """
    for field in ("repetitions", "steps"):
        check_integer(field, config[field], 1)
    if not config.drafters:
        raise InputError("drafters: expected at least one, found none")
    prepared, target = {}, None
    for name in config.drafters:
        if name in prepared:
            raise InputError(f"drafters: expected different ones, found {name} twice")
        values = config_of(name, config, folder)
        prepared[name] = fit.prepare(values, workdir / name, configs.mesh(values.mesh))
        task = cast(DrafterTask, prepared[name][0])
        target = task.target = target or task.target  # one copy of its weights serves all
    configs.begin(f"Training steps of drafters for {config.target}", config, workdir)
    trainings = {
        name: cost.CompiledTraining(*prepared[name])
        for name in terminal.progress("trainings compiled")(list(prepared))
    }
    turns = terminal.progress("turns")
    records = cost.time_in_turns(trainings, config.repetitions, config.steps, turns)
    _, options, _ = prepared[config.drafters[0]]
    machine = hardware.machine(target) | {"dtype": jnp.dtype(options.compute.dtype).name}
    figures = {"machine": machine, "rows": records}
    return report.write(workdir, figures, table(records), plot("plots.trainings", records))


def config_of(name: str, config: ConfigDict, folder: pathlib.Path) -> ConfigDict:
    """Returns the config of a drafter's training; raises InputError if the folder has none."""
    known = sorted(path.stem for path in folder.glob("*.py"))
    if name not in known:
        raise InputError(
            f"drafters: expected some of {', '.join(known)}, found {short_repr(name)}"
            f"{did_you_mean(str(name), known)}"
        )
    values = configs.of_file(str(folder / f"{name}.py"))
    if "target" in config.changes:
        raise InputError("changes.target: expected none beside the key target, found one")
    try:
        values.update(config.changes)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"changes: expected values of the types in {name}.py, found others: {one_line(error)}"
        ) from None
    values.target = config.target
    return values


def table(rows: Iterable[Mapping]) -> str:
    """Returns a Markdown table."""
    columns = {
        "drafter": "name",
        "parameters, M": lambda row: report.number(row["parameters"] / 1e6),
        "Mflop per token, without the vocabulary": lambda row: report.number(
            row["operations_per_token"] / 1e6, 0
        ),
        "µs per token": report.figure("us_per_token", 1),
        "over the first": lambda row: report.within(row["ratio"], row["ratio_range"]),
        "compilation, s": report.figure("compile_seconds", 1),
    }
    return report.table(rows, columns)
