"""Table of reinforcement learning with several drafts."""

from collections.abc import Iterable, Mapping

from spsjax.benchmarks import report


def table(arms: Iterable[Mapping]) -> str:
    """Returns a table with a row per run; ranges go from its first quarter to its last."""
    columns = {
        "draft": "arm",
        "reward": _both("reward"),
        "accepted draft tokens per round": _both("accepted"),
        "sampling, s per step": report.figure("sampling"),
        "training of the target": report.figure("target"),
        "of the draft": report.figure("draft"),
        "speed-up of sampling": report.figure("speedup"),
        "of the step": report.figure("step_speedup"),
    }
    return report.table(arms, columns)


def _both(field: str) -> report.Column:
    def cell(row: Mapping) -> str:
        first, last = row[field]
        return f"{first:.2f} to {last:.2f}" if first or last else "-"

    return cell
