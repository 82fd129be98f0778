"""What the scripts draw, as PNG files; needs matplotlib."""

import contextlib
from collections.abc import Iterator

import matplotlib

from spsjax.cli import terminal
from spsjax.evaluation import race
from spsjax.utils import atomic_files

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator


@contextlib.contextmanager
def panels(path, rows: int, columns: int, dpi: int = 150, **options) -> Iterator:
    """Axes [rows, columns] to draw on; then the file is written, whole or not at all."""
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    try:
        yield axes
        with atomic_files.atomic_write(path) as partial:
            figure.savefig(partial, dpi=dpi, format="png")
    finally:
        pyplot.close(figure)


def speed(lines, path, mark: str = "") -> None:
    """Speed-up over K, and acceptance by position; `mark` says what is odd about them."""
    with panels(path, 1, 2, figsize=(10, 4)) as axes:
        left, right = axes[0]
        for index, setting in enumerate(dict.fromkeys(line.setting for line in lines)):
            ours = [line for line in lines if line.setting == setting and line.name == "SpS"]
            colour = f"C{index}"
            ks = [line.num_speculative_tokens for line in ours]
            left.plot(ks, [line.speedup for line in ours], "o-", color=colour, label=setting)
            for line in lines:
                if line.setting == setting and line.name == "n-gram":
                    left.axhline(line.speedup, color=colour, ls=":", label=f"{setting}, n-gram")
        left.axhline(1, color="grey", lw=0.8)
        left.set(xlabel="K, draft tokens a round", ylabel="speed-up over ArS", ylim=(0, None))
        for index, line in enumerate(terminal.longest(lines)):
            values = [float("nan") if x is None else x for x in line.acceptance_by_position]
            positions = range(1, len(values) + 1)
            right.plot(positions, values, "o-", color=f"C{index}", label=line.setting)
        right.set(
            xlabel="position of the draft token", ylabel="P(accepted | reached)", ylim=(0, 1.02)
        )
        for each in (left, right):
            each.set_title(mark)
            each.xaxis.set_major_locator(MaxNLocator(integer=True))
            if each.get_legend_handles_labels()[0]:
                each.legend(loc="lower left")


def bars(rows: dict[str, dict[str, float]], path) -> None:
    """Drafts side by side: acceptance, tokens a call, and speed-up if it was measured."""
    names, first = list(rows), next(iter(rows.values()))
    unplotted = ("± ", "greedy agreement", "ms a draft step")
    shared = [name for name in first if all(name in row for row in rows.values())]
    shown = [name for name in shared if name not in unplotted]
    size = 3.2 * len(shown) + 2, 0.3 * len(rows) + 1.2
    with panels(path, 1, len(shown), 120, figsize=size, sharey=True) as axes:
        for axis, name in zip(axes[0], shown):
            values = [rows[row][name] for row in names]
            spread = [rows[row]["± "] for row in names] if name == "acceptance" else None
            axis.barh(names, values, xerr=spread, color="C0", height=0.6)
            axis.set(xlabel=name, xlim=(0.9 * min(values), 1.03 * max(values)))
        axes[0, 0].invert_yaxis()


def figure1(found, tokens: int, path) -> None:
    """Time, tokens a call and a round's time over K, with what theory expects (Chen et al. 2023).

    Args:
        found: `reproduction.Found` by task.
        tokens: the time of so many is shown.
        path: of the PNG.
    """
    with panels(path, 1, 3, figsize=(13, 4)) as axes:
        time, filled, loop = axes[0]
        colours = (f"C{index}" for index in range(10))
        for task, each in found.items():
            settings = dict.fromkeys(row.setting for row in each.rows)
            for setting in settings:
                name = f"{task}, {setting}" if len(settings) > 1 else task
                rows = [row for row in each.rows if row.setting == setting]
                _curves(time, filled, loop, rows, each, setting, tokens, name, next(colours))
        time.set(ylabel=f"ms for {tokens} tokens", title="time, with its spread over texts")
        filled.set(ylabel="tokens a call / (K + 1)", title="of what a call could give")
        loop.set(ylabel="ms a round", title="a round of the loop")
        for axis in (time, filled, loop):
            axis.set(xlabel="K, draft tokens a round", ylim=(0, None))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        time.legend(fontsize="small")
        loop.plot([], [], "--", color="grey", label="theory")
        loop.legend(fontsize="small")


def _curves(time, filled, loop, rows, found, setting, tokens, name, colour) -> None:
    base, *ours = [row for row in rows if row.sampler in (race.BASELINE, "SpS")]
    ks = [row.num_speculative_tokens for row in ours]
    means = [tokens * row.ms_per_token for row in (base, *ours)]
    spreads = [tokens * row.spread_ms for row in (base, *ours)]
    time.errorbar([0, *ks], means, spreads, fmt="o", ms=4, capsize=2, color=colour, label=name)
    ratios = [row.tokens_per_call / (row.num_speculative_tokens + 1) for row in ours]
    filled.plot(ks, ratios, "o", ms=4, color=colour)
    loop.plot([0, *ks], [row.ms_per_round for row in (base, *ours)], "o", ms=4, color=colour)
    predicted, costs = found.predicted.get(setting), found.costs.get(setting)
    if not predicted:
        return
    counts = [each.num_speculative_tokens for each in predicted]
    prompts = {
        row.num_speculative_tokens: row.ms_per_token - row.ms_per_round / row.tokens_per_call
        for row in ours
    }
    times = [
        tokens * (prompts[each.num_speculative_tokens] + base.ms_per_round / each.speedup)
        for each in predicted
    ]
    time.plot(counts, times, "--", color=colour)
    calls = [each.tokens_per_call / (each.num_speculative_tokens + 1) for each in predicted]
    filled.plot(counts, calls, "--", color=colour)
    rounds = [base.ms_per_round * (K * costs.draft_step[K] + costs.scoring[K]) for K in counts]
    loop.plot(counts, rounds, "--", color=colour)


def accepted(found, path) -> None:
    """Exact acceptance by the class of a token and by the target's entropy, of each task."""
    known = {
        f"{task}, {setting}": (each.kinds[setting], each.entropies[setting])
        for task, each in found.items()
        for setting in each.kinds
    }
    with panels(path, 1, 2, figsize=(10, 0.35 * len(known) + 3)) as axes:
        for axis, index, title in zip(axes[0], (0, 1), ("class of the token", "entropy, nats")):
            names = sorted({name for shares in known.values() for name in shares[index]})
            width = 0.8 / max(len(known), 1)
            for place, (label, shares) in enumerate(known.items()):
                at = [names.index(name) + place * width for name in shares[index]]
                values = [share.acceptance for share in shares[index].values()]
                axis.bar(at, values, width, label=label)
            middle = [index + 0.4 - width / 2 for index in range(len(names))]
            axis.set(xlabel=title, ylabel="acceptance, exact", ylim=(0, 1))
            axis.set_xticks(middle, names)
        handles = axes[0, 0].get_legend_handles_labels()
        where = {"loc": "outside upper center", "ncols": 3}
        axes[0, 0].get_figure().legend(*handles, fontsize="small", **where)


def predicted(curves: dict[str, dict[int, tuple]], path) -> None:
    """Tokens a call and speed-up over K, as the theory has them."""
    with panels(path, 1, 2, figsize=(10, 4)) as axes:
        for index, title in enumerate(("tokens a call", "speed-up over ArS")):
            axis = axes[0, index]
            for name, curve in curves.items():
                values = [values[index] for values in curve.values()]
                axis.plot(list(curve), values, ".-", label=name or None)
            axis.set(xlabel="K, draft tokens a round", ylabel=title, ylim=(0, None))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, 1].axhline(1, color="grey", lw=0.8)
        if any(curves):
            axes[0, 0].legend(fontsize="small")
