"""Plots of scripts/compare.py as PNG files; needs matplotlib."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from spsjax.cli.plots import distinct, panels
from spsjax.utils import extras

with extras.needed("plots"):
    import matplotlib
    from matplotlib.ticker import MaxNLocator


def verifiers(rows: Sequence[Mapping], path) -> None:
    """Draws tokens per call over draft tokens per round, one panel per sampling setting."""
    settings = distinct(rows, "setting")
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
                style = {"ls": styles[draft], "marker": "o", "ms": 3, "color": colours[rule]}
                axis.plot(*zip(*line), label=f"{rule}, {draft}", **style)
            axis.set(title=setting, xlabel="draft tokens per round")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
        axes[0][0].set(ylabel="tokens per call", ylim=(1, None))
        axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def drafters(rows: Sequence[Mapping], path) -> None:
    """Draws acceptance by depth and tokens per call, one column per sampling setting."""
    settings = distinct(rows, "setting")
    palette: Any = matplotlib.colormaps["tab20"]
    palette = palette.colors
    palette = [*palette[::2], *palette[1::2]]  # ten strong colours, then ten light ones
    colours = dict(zip(dict.fromkeys(row["drafter"] for row in rows), itertools.cycle(palette)))
    shapes = distinct(rows, "shape")
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
                columns = [shapes.index(row["shape"]) for row in own]
                below.plot(columns, [row["tokens_per_call"] for row in own], "o", color=colour)
            above.set(title=setting, xlabel="depth of the draft token", ylim=(0, 1.02))
            above.xaxis.set_major_locator(MaxNLocator(integer=True))
            below.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
        axes[0][0].set(ylabel="P(accepted | reached)")
        axes[1][0].set(ylabel="tokens per call", ylim=(1, None))
        axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def tasks(rows: Sequence[Mapping], path) -> None:
    """Draws the speed-up of every drafter by task, one panel per sampling setting.

    Bars are the fastest drafts of a fixed shape, diamonds those whose K is chosen in every round.
    """
    settings, names, titles = (distinct(rows, key) for key in ("setting", "drafter", "task"))
    width = 0.8 / len(names)
    size = 2 + 0.5 * len(titles) * max(len(names) / 2, 1), 3.4 * len(settings)
    with panels(path, len(settings), 1, figsize=size, sharex=True) as axes:
        for axis, setting in zip(axes[:, 0], settings):
            for index, name in enumerate(names):
                fixed, chosen = [], []
                for task in titles:
                    key = setting, name, task
                    own = [r for r in rows if (r["setting"], r["drafter"], r["task"]) == key]
                    for values, is_chosen in ((fixed, False), (chosen, True)):
                        kind = [r for r in own if ("K chosen" in r["shape"]) == is_chosen]
                        values.append(max((r["speedup"] for r in kind), default=float("nan")))
                shift = (index - (len(names) - 1) / 2) * width
                offsets = [task + shift for task in range(len(titles))]
                axis.bar(offsets, fixed, width, label=name)
                axis.plot(offsets, chosen, "kD", markersize=4)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set(title=setting, ylabel="speed-up")
            axis.set_xticks(range(len(titles)), titles, rotation=25, ha="right")
        axes[0][0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
