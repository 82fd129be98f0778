"""Plots of training runs, as PNG files."""

import pathlib
from collections.abc import Mapping, Sequence

from spsjax.errors import InputError
from spsjax.parallel import multihost
from spsjax.training import run_folder
from spsjax.utils import atomic_files, extras

FILE = "curves.png"
_METRICS = "loss", "acceptance", "block_efficiency"


def plot_curves(folder: pathlib.Path) -> str:
    """Draws a run's metrics over its steps to `curves.png`.

    Returns why there are no curves, or an empty text if there are.
    """
    if not extras.installed("matplotlib"):
        return extras.NO_PLOT
    if not multihost.is_main_process():
        return ""
    log = run_folder.read_log(folder)
    logged = {name for record in log for name in record}
    panels = [name for name in _METRICS if name in logged]
    if not panels:
        return f"{folder / 'log.jsonl'} has no measurements"
    figure = _figure(figsize=(5 * len(panels), 4))
    for axis, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for group in dict.fromkeys(record["group"] for record in log):
            points = [
                (record["step"], record[name])
                for record in log
                if record["group"] == group and name in record
            ]
            if points:
                _draw_curve(axis, points, group)
        axis.set(xlabel="step", title=name.replace("_", " "))
        axis.legend()
    with atomic_files.atomic_write(folder / FILE) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return ""


def plot_depths(runs: Mapping[str, str | pathlib.Path], path: str | pathlib.Path) -> None:
    """Draws acceptance by depth from the last evaluations of trainings of feature drafters.

    It is the probability that a draft token is accepted if all earlier tokens are the text's own:
    the papers' n-alpha, on held-out text, with its 95% interval. `runs` are folders by title.
    Raises InputError if a run has no evaluation, or if matplotlib is missing.
    """
    figure = _figure(figsize=(8, 4))
    axis = figure.subplots()
    for name, folder in runs.items():
        means, intervals = _acceptance_by_depth(pathlib.Path(folder))
        depths = range(1, len(means) + 1)
        axis.errorbar(depths, means, intervals, marker="o", capsize=2, label=name)
    axis.set(xlabel="depth of the draft token", ylabel="acceptance, held-out text", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    with atomic_files.atomic_write(pathlib.Path(path)) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _acceptance_by_depth(folder: pathlib.Path) -> tuple[list[float], list[float]]:
    """Returns means and intervals of the last evaluation on held-out text."""
    log = [record for record in run_folder.read_log(folder) if record["group"] == "held_out"]
    if not log or "acceptance" not in log[-1]:
        raise InputError(f"{folder}: expected the folder of a drafter's training, found none")
    names = ["acceptance"]
    while f"acceptance_{len(names) + 1}" in log[-1]:
        names.append(f"acceptance_{len(names) + 1}")
    return _means_and_intervals([log[-1][name] for name in names])


def _figure(**options):
    # The Agg canvas needs no display. pyplot would choose a backend for the whole process.
    with extras.needed("plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def _draw_curve(axis, points: list[tuple], label: str) -> None:
    """Draws (step, value) pairs; a value is a number or a metric summary with its interval."""
    steps, values = zip(*points)
    means, intervals = _means_and_intervals(values)
    if any(isinstance(value, dict) for value in values):
        axis.errorbar(steps, means, intervals, label=label, capsize=2)
    else:
        axis.plot(steps, means, label=label, linewidth=1)


def _means_and_intervals(values: Sequence) -> tuple[list[float], list[float]]:
    means = [value["mean"] if isinstance(value, dict) else value for value in values]
    intervals = [value["interval"] or 0.0 if isinstance(value, dict) else 0.0 for value in values]
    return means, intervals
