"""Plots of the scripts as PNG files; needs matplotlib."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

import matplotlib

from spsjax.cli import terminal
from spsjax.evaluation.paper import TaskReport
from spsjax.evaluation.samplers import Role
from spsjax.evaluation.summary import SystemSummary
from spsjax.performance import decode_times
from spsjax.utils import atomic_files

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

_K_LABEL = "K, draft tokens per round"


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
        left.set(xlabel=_K_LABEL, ylabel="speed-up over ArS", ylim=(0, None))
        for index, system in enumerate(terminal.largest_k(systems)):
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
        path: path of the PNG.
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


def figure1(reports: Mapping[str, TaskReport], tokens: int, path) -> None:
    """Draws time, block efficiency and time per round over K, with the predictions.

    It corresponds to figure 1 of Chen et al. 2023 (arXiv 2302.01318).

    Args:
        reports: reports by task.
        tokens: number of tokens whose time is shown.
        path: path of the PNG.
    """
    with panels(path, 1, 3, figsize=(13, 4)) as axes:
        time, efficiency, loop = axes[0]
        colours = (f"C{index}" for index in range(10))
        for task, report in reports.items():
            settings = dict.fromkeys(system.setting for system in report.systems)
            for setting in settings:
                name = f"{task}, {setting}" if len(settings) > 1 else task
                _curves(axes[0], report, setting, tokens, name, next(colours))
        time.set(ylabel=f"ms for {tokens} tokens", title="time, with its spread over texts")
        efficiency.set(ylabel="tokens per call / (K + 1)", title="share of a call's most tokens")
        loop.set(ylabel="ms per round", title="time per round of the loop")
        for axis in (time, efficiency, loop):
            axis.set(xlabel=_K_LABEL, ylim=(0, None))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        time.legend(fontsize="small")
        loop.plot([], [], "--", color="grey", label="theory")
        loop.legend(fontsize="small")


def _curves(
    axes: Sequence, report: TaskReport, setting: str, tokens: int, name: str, colour: str
) -> None:
    """Draws the curves of one task and setting on the three axes of figure 1."""
    time, efficiency, loop = axes
    of_setting = [system for system in report.systems if system.setting == setting]
    base = next(system for system in of_setting if system.role == Role.BASELINE)
    drafted = {
        system.num_speculative_tokens: system
        for system in of_setting
        if system.role == Role.SPECULATIVE
    }
    both = [base, *drafted.values()]
    means = [tokens * system.ms_per_token for system in both]
    spreads = [tokens * system.ms_per_token_std for system in both]
    counts = [0, *drafted]
    time.errorbar(counts, means, spreads, fmt="o", ms=4, capsize=2, color=colour, label=name)
    ratios = [system.block_efficiency / (K + 1) for K, system in drafted.items()]
    efficiency.plot(list(drafted), ratios, "o", ms=4, color=colour)
    loop.plot(counts, [system.ms_per_round for system in both], "o", ms=4, color=colour)

    costs = report.draft.costs.get(setting)
    predictions = report.draft.predictions.get(setting)
    if not predictions:
        return
    counts = [prediction.num_speculative_tokens for prediction in predictions]
    # The prediction is of the loop. The rest of a token's time, its share of the prompt, is added.
    prompts = {
        K: system.ms_per_token - system.ms_per_round / system.block_efficiency
        for K, system in drafted.items()
    }
    times = [
        tokens * (prompts[K] + base.ms_per_round / prediction.cost_aware_speedup)
        for K, prediction in zip(counts, predictions)
    ]
    time.plot(counts, times, "--", color=colour)
    shares = [prediction.block_efficiency / (K + 1) for K, prediction in zip(counts, predictions)]
    efficiency.plot(counts, shares, "--", color=colour)
    rounds = [base.ms_per_round * (K * costs.draft_step[K] + costs.scoring[K]) for K in counts]
    loop.plot(counts, rounds, "--", color=colour)


def acceptance(reports: Mapping[str, TaskReport], path) -> None:
    """Draws the exact acceptance rate by token class and by entropy, for each task."""
    shares = {
        f"{task}, {setting}": (
            report.draft.by_token_class[setting],
            report.draft.by_entropy[setting],
        )
        for task, report in reports.items()
        for setting in report.draft.by_token_class
    }
    with panels(path, 1, 2, figsize=(10, 0.35 * len(shares) + 3)) as axes:
        for axis, index, title in zip(axes[0], (0, 1), ("class of the token", "entropy, nats")):
            names = sorted({name for pair in shares.values() for name in pair[index]})
            width = 0.8 / max(len(shares), 1)
            for number, (label, pair) in enumerate(shares.items()):
                offsets = [names.index(name) + number * width for name in pair[index]]
                values = [share.acceptance for share in pair[index].values()]
                axis.bar(offsets, values, width, label=label)
            middle = [tick + 0.4 - width / 2 for tick in range(len(names))]
            axis.set(xlabel=title, ylabel="acceptance rate, exact", ylim=(0, 1))
            axis.set_xticks(middle, names)
        handles = axes[0, 0].get_legend_handles_labels()
        layout = {"loc": "outside upper center", "ncols": 3}
        axes[0, 0].get_figure().legend(*handles, fontsize="small", **layout)


def predicted(curves: Mapping[str, Mapping[int, tuple]], path) -> None:
    """Draws the predicted block efficiency and speed-up over K.

    Args:
        curves: block efficiency and speed-up by K, by name.
        path: path of the PNG.
    """
    with panels(path, 1, 2, figsize=(10, 4)) as axes:
        for index, title in enumerate(("tokens per call", "speed-up over ArS")):
            axis = axes[0, index]
            for name, curve in curves.items():
                values = [figures[index] for figures in curve.values()]
                axis.plot(list(curve), values, ".-", label=name or None)
            axis.set(xlabel=_K_LABEL, ylabel=title, ylim=(0, None))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, 1].axhline(1, color="grey", lw=0.8)
        if any(curves):
            axes[0, 0].legend(fontsize="small")


def load(rows: Sequence[Mapping], path) -> None:
    """Draws the mean and the 99th percentile of latency over the load, one line per system."""
    kinds = list(dict.fromkeys(row["load"] for row in rows))
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


def decoding(results: Sequence[Mapping], path) -> None:
    """Draws the time per token at the shapes of scripts/gpu_suite.sh, one panel per pair.

    Args:
        results: results of the parts "loop" and "huggingface"; others are left out.
        path: path of the PNG.
    """
    bars: dict[str, dict[str, dict[str, tuple]]] = {}  # by pair and shape: order and time
    bounds: dict[tuple[str, str], float] = {}
    for result in results:
        for row in result["rows"] if result["part"] in ("loop", "huggingface") else ():
            if not row["tokens"]:
                continue
            cell = row.get("cell", row)
            if "variant" in row:
                name, order = f"HF {row['variant']}", 0
            else:
                program = decode_times.Cell(**cell)
                name, order = program.name, 1 + program.nodes
            shape = f"batch {cell['batch']}, context {cell['context']}"
            own = bars.setdefault(result["pair"], {}).setdefault(shape, {})
            own[name] = order, row["ms"] / row["tokens"]
            if name == "ArS":
                bounds[result["pair"], shape] = row["lower_bound_ms"]
    shapes = list(dict.fromkeys(shape for own in bars.values() for shape in own))
    if not shapes:
        return
    size = 5 * len(bars), 2.6 * len(shapes)
    with panels(path, len(shapes), len(bars), figsize=size) as axes:
        for column, (pair, own) in enumerate(bars.items()):
            for row, shape in enumerate(shapes):
                axis, times = axes[row, column], own.get(shape, {})
                if not times:
                    axis.set_axis_off()
                    continue
                names = sorted(times, key=times.get)
                axis.barh(names, [times[name][1] for name in names], color="C0", height=0.6)
                bound = bounds.get((pair, shape))
                if bound is not None:
                    axis.axvline(bound, color="C3", ls=":", label="lower bound of ArS")
                    axis.legend(fontsize="small")
                axis.set(title=f"{pair}, {shape}", xlabel="ms per token and row", xlim=(0, None))
                axis.invert_yaxis()


def verifiers(rows: Sequence[Mapping], path) -> None:
    """Draws tokens per call over the draft tokens of a round, one panel per sampling setting.

    Args:
        rows: rows of compare_verifiers.py.
        path: path of the PNG.
    """
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    kinds = list(dict.fromkeys((row["draft"], row["rule"]) for row in rows))
    styles = dict(
        zip(dict.fromkeys(draft for draft, _ in kinds), ("--", "-", ":", "-.", (0, (1, 5))))
    )
    colours = {rule: f"C{i}" for i, rule in enumerate(dict.fromkeys(rule for _, rule in kinds))}
    with panels(path, 1, len(settings), figsize=(4.2 * len(settings), 4.2), sharey=True) as axes:
        for axis, setting in zip(axes[0], settings):
            for draft, rule in kinds:
                line = sorted(
                    (row["num_nodes"], row["expected"])
                    for row in rows
                    if (row["setting"], row["draft"], row["rule"]) == (setting, draft, rule)
                )
                label = f"{rule}, {draft}"
                axis.plot(
                    *zip(*line),
                    ls=styles[draft],
                    marker="o",
                    ms=3,
                    color=colours[rule],
                    label=label,
                )
            axis.set(title=setting, xlabel="draft tokens per round")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
        axes[0][0].set(ylabel="tokens per call", ylim=(1, None))
        axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def drafters(rows: Sequence[Mapping], path) -> None:
    """Draws acceptance by depth and tokens per call, one column per sampling setting.

    Args:
        rows: rows of compare_drafters.py.
        path: path of the PNG.
    """
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    palette = matplotlib.colormaps["tab20"].colors
    palette = [*palette[::2], *palette[1::2]]  # ten strong colours, then ten light ones
    colours = dict(zip(dict.fromkeys(row["drafter"] for row in rows), itertools.cycle(palette)))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    size = 4.2 * len(settings), 7
    with panels(path, 2, len(settings), figsize=size, sharey="row") as axes:
        for column, setting in enumerate(settings):
            above, below = axes[:, column]
            for name, colour in colours.items():
                own = [row for row in rows if (row["setting"], row["drafter"]) == (setting, name)]
                deepest = max(own, key=lambda row: len(row["acceptance_by_depth"] or []))
                rates = deepest["acceptance_by_depth"] or []
                values = [float("nan") if rate is None else rate for rate in rates]
                depths = range(1, len(values) + 1)
                above.plot(depths, values, "o-", color=colour, label=f"{name}, {deepest['shape']}")
                places = [shapes.index(row["shape"]) for row in own]
                below.plot(places, [row["tokens_per_call"] for row in own], "o", color=colour)
            above.set(title=setting, xlabel="depth of the draft token", ylim=(0, 1.02))
            above.xaxis.set_major_locator(MaxNLocator(integer=True))
            below.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
        axes[0][0].set(ylabel="P(accepted | reached)")
        axes[1][0].set(ylabel="tokens per call", ylim=(1, None))
        axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def contexts(rows: Sequence[Mapping], path) -> None:
    """Draws the best way to decode by batch and context, one panel per kind of devices.

    Args:
        rows: rows of plan_context.py.
        path: path of the PNG.
    """
    panel_names, batches, lengths = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("devices", "batch", "context")
    )
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


def tasks(rows: Sequence[Mapping], path) -> None:
    """Draws the speed-up of every drafter by task, one panel per sampling setting.

    Bars are the fastest drafts of a fixed shape, diamonds those whose K is chosen in every round.

    Args:
        rows: rows of compare_drafters.py.
        path: path of the PNG.
    """
    settings, names, titles = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("setting", "drafter", "task")
    )
    width = 0.8 / len(names)
    size = 2 + 0.5 * len(titles) * max(len(names) / 2, 1), 3.4 * len(settings)
    with panels(path, len(settings), 1, figsize=size, sharex=True) as axes:
        for axis, setting in zip(axes[:, 0], settings):
            for index, name in enumerate(names):
                fixed, chosen = [], []
                for task in titles:
                    key = setting, name, task
                    own = [r for r in rows if (r["setting"], r["drafter"], r["task"]) == key]
                    paced = [r["speedup"] for r in own if "K chosen" in r["shape"]]
                    others = [r["speedup"] for r in own if "K chosen" not in r["shape"]]
                    fixed.append(max(others, default=float("nan")))
                    chosen.append(max(paced, default=float("nan")))
                places = [
                    task + (index - (len(names) - 1) / 2) * width for task in range(len(titles))
                ]
                axis.bar(places, fixed, width, label=name)
                axis.plot(places, chosen, "kD", markersize=4)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set(title=setting, ylabel="speed-up")
            axis.set_xticks(range(len(titles)), titles, rotation=25, ha="right")
        axes[0][0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
