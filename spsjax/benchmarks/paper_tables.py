"""Tables of the report of an experiment."""

from spsjax.benchmarks import paper, summary
from spsjax.benchmarks.paper import TaskReport
from spsjax.benchmarks.report import number, within
from spsjax.benchmarks.summary import SystemSummary
from spsjax.planning.outcome import Table

Section = tuple[list[str], list[list]]  # titles of the columns, and cells of the rows


def all_tables(task: str, result: TaskReport) -> list[Table]:
    """Returns the tables of a task; the first two columns of each are text."""
    sections = {"time": times(result.systems)}
    sections |= {f"{group}: time": times(systems) for group, systems in result.groups.items()}
    sections["quality"] = quality(result.systems)
    if any(result.draft.predictions.values()):
        sections["speed-up of the loop, by theory and measured"] = theory(result)
    if result.draft.by_token_class:
        sections["where drafts are accepted"] = acceptance(result)
    if any(result.divergences.values()):
        sections["divergence of greedy texts from plain sampling"] = divergences(result)
    return [
        Table(f"{task}{', ' if title.endswith(': time') else ': '}{title}", *section, left=2)
        for title, section in sections.items()
    ]


def times(systems: list[SystemSummary]) -> Section:
    """Returns the table of time, speed-up and tokens per call."""
    levels = ", ".join(f"P{level}" for level in summary.PERCENTILES)
    header = ["setting", "system", "texts", "ms/token", "speed-up (95%)", "tokens per call"]
    rows = []
    for system in systems:
        speedup = within(system.speedup, system.speedup_interval) if system.speedup else "1"
        latency = ", ".join(f"{system.latency_ms[level]:.0f}" for level in summary.PERCENTILES)
        cells = [system.setting, _label(system), system.num_texts, number(system.ms_per_token)]
        rows.append([*cells, speedup, number(system.block_efficiency), latency])
    return [*header, f"{levels} ms"], rows


def quality(systems: list[SystemSummary]) -> Section:
    """Returns the table of the task's metrics and n-grams, with tests against plain sampling."""
    rows = []
    for system in systems:
        for name in dict.fromkeys((*system.scores, *system.p_values)):
            means = (means.get(name) for means in (system.scores, system.score_differences))
            cells = [within(*mean, digits=3) if mean else "-" for mean in means]
            p_value = number(system.p_values.get(name), 3)
            rows.append([system.setting, _label(system), name, *cells, p_value])
    header = ["setting", "system", "metric", "mean (95%)", "difference from ArS (95%)", "p-value"]
    return header, rows


def _label(system: SystemSummary | paper.Divergences) -> str:
    """Returns the text that names a system and its K."""
    return paper.label(system.system, system.num_speculative_tokens)


def theory(result: TaskReport) -> Section:
    """Returns the table of predicted and measured speed-ups."""
    header = ["setting", "K", "tokens per call", "draft step", "scoring"]
    header += ["speed-up if scoring is free", "by theory", "measured", "measured / by theory"]
    rows = []
    for setting, predictions in result.draft.predictions.items():
        costs = result.draft.costs[setting]
        for prediction in predictions:
            K = prediction.num_speculative_tokens
            measured, expected = prediction.loop_speedup, prediction.cost_aware_speedup
            figures = costs.scoring[K], prediction.predicted_speedup, expected, measured
            figures += measured / expected, prediction.round_over_cost
            cells = [number(prediction.block_efficiency), number(costs.draft_step[K], 3)]
            rows.append([setting, K, *cells, *map(number, figures)])
    return [*header, "round time / sum of its costs"], rows


def acceptance(result: TaskReport) -> Section:
    """Returns the table of exact acceptance rates by class, and of measured ones by position."""
    rows, draft = [], result.draft
    for kind, by_setting in (("class", draft.by_token_class), ("entropy, nats", draft.by_entropy)):
        for setting, shares in by_setting.items():
            for name, share in shares.items():
                rows.append([setting, kind, name, f"{share.share:.1%}", f"{share.acceptance:.3f}"])
    for setting, rates in draft.acceptance_by_position.items():
        for index, rate in enumerate(rates, 1):
            rows.append([setting, "position, if reached", index, "-", number(rate, 3)])
    return ["setting", "grouped by", "group", "share of tokens", "acceptance rate"], rows


def divergences(result: TaskReport) -> Section:
    """Returns the table of divergent greedy texts, with the target's margins at the divergence."""
    rows = []
    for setting, systems in result.divergences.items():
        for system in systems:
            margins = sorted(divergence.margin for divergence in system.divergences)
            ends = [f"{margins[0]:.2g}", f"{margins[-1]:.2g}"] if margins else ["-", "-"]
            rows.append([setting, _label(system), system.num_texts, len(margins), *ends])
    header = ["setting", "system", "texts", "diverging", "least logit margin", "greatest"]
    return header, rows
