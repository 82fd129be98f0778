"""Training curves of a run, as a PNG file."""

import importlib.util
import pathlib

from spsjax.parallel import multihost
from spsjax.training import run_folder
from spsjax.utils import atomic_files

FILE = "curves.png"
_METRICS = "loss", "acceptance", "block_efficiency"


def plot_curves(folder: pathlib.Path) -> str:
    """Draws a run's metrics over its steps to `curves.png`.

    Returns why there are no curves, or an empty text if there are.
    """
    if not importlib.util.find_spec("matplotlib"):
        return "matplotlib is not installed"
    if not multihost.is_main_process():
        return ""
    # The Agg canvas needs no display. pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    log = run_folder.read_log(folder)
    logged = {name for record in log for name in record}
    panels = [name for name in _METRICS if name in logged]
    if not panels:
        return f"{folder / 'log.jsonl'} has no measurements"
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
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


def _draw_curve(axis, points: list[tuple], label: str) -> None:
    """Draws (step, value) pairs; a value is a number or a metric summary with its interval."""
    steps, values = zip(*points)
    means = [value["mean"] if isinstance(value, dict) else value for value in values]
    intervals = [value["interval"] or 0.0 if isinstance(value, dict) else 0.0 for value in values]
    if any(isinstance(value, dict) for value in values):
        axis.errorbar(steps, means, intervals, label=label, capsize=2)
    else:
        axis.plot(steps, means, label=label, linewidth=1)
