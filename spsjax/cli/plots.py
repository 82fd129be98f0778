"""Plots of the scripts as PNG files; needs matplotlib."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from spsjax.benchmarks.summary import SystemSummary, largest_k
from spsjax.benchmarks.systems import Role
from spsjax.utils import atomic_files, extras

with extras.needed("plots"):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

K_LABEL = "K, draft tokens per round"


@contextlib.contextmanager
def panels(path, rows: int, columns: int, dpi: int = 150, **options) -> Iterator:
    """Yields axes [rows, columns] to draw on, and then writes the file atomically."""
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    try:
        yield axes
        with atomic_files.atomic_write(path) as partial:
            figure.savefig(partial, dpi=dpi, format="png")
    finally:
        pyplot.close(figure)


def distinct(rows: Iterable[Mapping], key: str) -> list:
    """Returns the distinct values of a key in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def speed(systems: Sequence[SystemSummary], path, mark: str = "") -> None:
    """Draws the speed-up over K and the acceptance rate by position; `mark` is a caveat."""
    with panels(path, 1, 2, figsize=(10, 4)) as axes:
        left, right = axes[0]
        for index, setting in enumerate(dict.fromkeys(system.setting for system in systems)):
            of_setting = [system for system in systems if system.setting == setting]
            drafted = [system for system in of_setting if system.role == Role.SPECULATIVE]
            colour = f"C{index}"
            counts = [system.num_speculative_tokens for system in drafted]
            speedups = [system.speedup for system in drafted]
            left.plot(counts, speedups, "o-", color=colour, label=setting)
            for system in of_setting:
                if system.role == Role.ALTERNATIVE:
                    label = f"{setting}, {system.system}"
                    left.axhline(system.speedup, color=colour, ls=":", label=label)
        left.axhline(1, color="grey", lw=0.8)
        left.set(xlabel=K_LABEL, ylabel="speed-up over ArS", ylim=(0, None))
        for index, system in enumerate(largest_k(systems)):
            rates = system.acceptance_by_position or []
            values = [float("nan") if rate is None else rate for rate in rates]
            positions = range(1, len(values) + 1)
            right.plot(positions, values, "o-", color=f"C{index}", label=system.setting)
        right.set(
            xlabel="position of the draft token", ylabel="P(accepted | reached)", ylim=(0, 1.02)
        )
        for axis in (left, right):
            axis.set_title(mark)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="lower left")


def bars(
    figures: Mapping[str, Mapping[str, float]],
    labels: Mapping[str, str],
    errors: Mapping[str, str],
    path,
) -> None:
    """Draws one bar chart per figure, with one bar per row of a comparison.

    Args:
        figures: figures by row and key; a figure that some row lacks is left out.
        labels: label by key of the figures to draw.
        errors: key of the half-width of a figure's interval, by the figure's key.
        path: file to write.
    """
    names = list(figures)
    keys = [key for key in labels if all(key in row for row in figures.values())]
    size = 3.2 * len(keys) + 2, 0.3 * len(names) + 1.2
    with panels(path, 1, len(keys), 120, figsize=size, sharey=True) as axes:
        for axis, key in zip(axes[0], keys):
            values = [figures[name][key] for name in names]
            widths = (
                [figures[name][errors[key]] or 0.0 for name in names] if key in errors else None
            )
            axis.barh(names, values, xerr=widths, color="C0", height=0.6)
            axis.set(xlabel=labels[key], xlim=(0.9 * min(values), 1.03 * max(values)))
        axes[0, 0].invert_yaxis()


def predicted(curves: Mapping[str, Mapping[int, tuple]], path) -> None:
    """Draws the predicted block efficiency and speed-up over K, one curve per name."""
    with panels(path, 1, 2, figsize=(10, 4)) as axes:
        for index, title in enumerate(("tokens per call", "speed-up over ArS")):
            axis = axes[0, index]
            for name, curve in curves.items():
                values = [figures[index] for figures in curve.values()]
                axis.plot(list(curve), values, ".-", label=name or None)
            axis.set(xlabel=K_LABEL, ylabel=title, ylim=(0, None))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, 1].axhline(1, color="grey", lw=0.8)
        if any(curves):
            axes[0, 0].legend(fontsize="small")


def load(rows: Sequence[Mapping], path) -> None:
    """Draws the mean and the 99th percentile of latency over the load, one line per system."""
    kinds = distinct(rows, "load")
    titles = {"rate": "requests per second", "clients": "clients"}
    with panels(path, len(kinds), 2, figsize=(10, 4 * len(kinds))) as axes:
        for line, kind in enumerate(kinds):
            for name in dict.fromkeys(row["system"] for row in rows):
                own = [row for row in rows if (row["load"], row["system"]) == (kind, name)]
                values = [row["value"] for row in own]
                means = [row["latency"] for row in own]
                worst = [row["latency_percentiles"][-1] for row in own]
                axes[line, 0].plot(values, means, "o-", label=name)
                axes[line, 1].plot(values, worst, "o-", label=name)
            for axis, title in zip(axes[line], ("mean latency, s", "99th percentile, s")):
                axis.set(xlabel=titles[kind], ylabel=title, xscale="log", yscale="log")
        axes[0, 0].legend(fontsize="small")


def contexts(rows: Sequence[Mapping], path) -> None:
    """Draws the fastest way to decode by batch and context, one panel per kind of devices."""
    panel_names, batches, lengths = (distinct(rows, key) for key in ("devices", "batch", "context"))
    ways = list(dict.fromkeys(row["name"] for row in rows if row["fits"]))
    colours = {way: f"C{index}" for index, way in enumerate(sorted(filter(None, ways)))}
    colours |= {"": "lightgrey"}
    columns = min(2, len(panel_names))
    lines = -(-len(panel_names) // columns)
    size = 1.1 * columns * (len(lengths) + 1), 0.5 * lines * (len(batches) + 2)
    with panels(path, lines, columns, figsize=size) as axes:
        for axis in axes.flat[len(panel_names) :]:
            axis.set_axis_off()
        for axis, name in zip(axes.flat, panel_names):
            for row in (row for row in rows if row["devices"] == name):
                x, y = lengths.index(row["context"]), batches.index(row["batch"])
                text, colour = "", "white"
                if row["fits"]:
                    text, colour = "plain", colours[row["name"]]
                    if row["name"]:
                        text = f"{row['speedup']:.2f}, K = {row['num_speculative_tokens']}"
                axis.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, fc=colour, ec="white"))
                axis.text(x, y, text, ha="center", va="center", fontsize="x-small")
            axis.set(title=name, ylabel="batch", xlim=(-0.5, len(lengths) - 0.5))
            axis.set(ylim=(-0.5, len(batches) - 0.5))
            axis.set_yticks(range(len(batches)), batches)
            axis.set_xticks(range(len(lengths)), lengths)
            axis.set(xlabel="context")
        labels = {way or "no draft": colour for way, colour in colours.items()}
        handles = [pyplot.Rectangle((0, 0), 1, 1, fc=colour) for colour in labels.values()]
        axes[0][-1].legend(handles, labels, loc="upper left", bbox_to_anchor=(1, 1))


def shapes(rows: Sequence[Mapping], path) -> None:
    """Draws the time per token by shape, one column per pair; rows without it are left out."""
    rows = [row for row in rows if row["tokens"]]
    cells = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    pairs = distinct(rows, "pair")
    if not rows:
        return
    size = 5 * len(pairs), 2.6 * len(cells)
    with panels(path, len(cells), len(pairs), figsize=size) as axes:
        for (line, cell), (column, pair) in itertools.product(enumerate(cells), enumerate(pairs)):
            axis = axes[line, column]
            own = [r for r in rows if (r["pair"], r["batch"], r["context"]) == (pair, *cell)]
            if not own:
                axis.set_axis_off()
                continue
            own.sort(key=lambda row: row["draft_tokens"])
            names = [row["program"] for row in own]
            axis.barh(names, [row["ms"] / row["tokens"] for row in own], color="C0", height=0.6)
            for row in own:
                if row["program"] == "ArS":
                    label = "lower bound of ArS"
                    axis.axvline(row["lower_bound_ms"], color="C3", ls=":", label=label)
                    axis.legend(fontsize="small")
            title = f"{pair}, batch {cell[0]}, context {cell[1]}"
            axis.set(title=title, xlabel="ms per token and row", xlim=(0, None))
            axis.invert_yaxis()


def arms(rows: Sequence[Mapping], path) -> None:
    """Draws reward, accepted draft tokens and seconds of sampling over the steps of each run."""
    titles = {
        "reward": "reward",
        "accepted": "accepted draft tokens per round",
        "sampling": "sampling, s per step",
    }
    with panels(path, 1, 3, figsize=(12, 3.5)) as axes:
        for axis, (key, title) in zip(axes[0], titles.items()):
            for arm in distinct(rows, "arm"):
                own = [row for row in rows if row["arm"] == arm]
                own = own[1:] if key == "sampling" and len(own) > 1 else own  # the first compiles
                if key != "accepted" or arm != "plain":
                    steps, values = [row["step"] for row in own], [row[key] for row in own]
                    axis.plot(steps, values, label=arm)
            axis.set(xlabel="step", ylabel=title, ylim=(0, None))
        axes[0, 0].legend()


def trainings(rows: Sequence[Mapping], path) -> None:
    """Draws the time per training token of each drafter over that of the first."""
    with panels(path, 1, 1, figsize=(7, 0.4 * len(rows) + 1.2)) as axes:
        axis = axes[0, 0]
        for row in rows:
            low, high = row["ratio_range"]
            sides = [[row["ratio"] - low], [high - row["ratio"]]]
            axis.barh(row["name"], row["ratio"], xerr=sides, color="C0", ecolor="grey")
        axis.axvline(1, color="grey", lw=0.8)
        axis.invert_yaxis()
        axis.set(xlabel=f"time per training token over that of {rows[0]['name']}", xlim=(0, None))
