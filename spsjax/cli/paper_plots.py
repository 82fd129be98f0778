"""Plots of scripts/reproduce.py as PNG files; needs matplotlib."""

from collections.abc import Mapping, Sequence

from spsjax.benchmarks.paper import TaskReport
from spsjax.benchmarks.systems import Role
from spsjax.cli.plots import K_LABEL, panels
from spsjax.utils import extras

with extras.needed("plots"):
    from matplotlib.ticker import MaxNLocator


def figure1(reports: Mapping[str, TaskReport], tokens: int, path) -> None:
    """Draws the time of `tokens` tokens, block efficiency and time per round over K.

    It corresponds to figure 1 of Chen et al. 2023 (arXiv 2302.01318), with predictions.
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
            axis.set(xlabel=K_LABEL, ylim=(0, None))
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
    # Predicted is the time of the loop. The share of the prompt in a token's time is added.
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
    """Draws the exact acceptance rate by token class and by entropy, per task."""
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
