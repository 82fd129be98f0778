"""Acceptance rates and costs in a `report.json` of scripts/reproduce.py."""

import dataclasses
import json
import pathlib
import sys

from spsjax.errors import InputError, check_number, one_line, short_repr
from spsjax.evaluation import theory_check


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measured figures of one task and setting, from which theory predicts a speed-up.

    Attributes:
        rates: acceptance rates by position; a position that was never reached has the rate of the
            position before.
        draft_step: cost per draft token, by K.
        scoring: cost of the pass over K + 1 tokens, by K.
    """

    rates: list[float]
    draft_step: dict[int, float]
    scoring: dict[int, float]


def read(path: str | pathlib.Path) -> dict[str, Measured]:
    """Returns the figures of a report by task and setting.

    Raises InputError if the file is not a report, or if a figure is missing or out of range.
    """
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: expected a report.json of reproduce.py, found {one_line(error)}"
        ) from None
    try:
        return {
            f"{task}, {setting}": _measured(report, ("tasks", task, "draft"), setting)
            for task in _fields(report, "tasks")
            for setting in _fields(report, "tasks", task, "draft", "costs")
        }
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _measured(report, draft: tuple[str, ...], setting: str) -> Measured:
    return Measured(
        _rates(report, *draft, "acceptance_by_position", setting),
        _costs(report, *draft, "costs", setting, "draft_step"),
        # Theorem 3.8 divides by the cost of a round, of which drafting may be a free part.
        _costs(report, *draft, "costs", setting, "scoring", above=True),
    )


def _rates(report, *names: str) -> list[float]:
    """Returns acceptance rates by position; only the first position has to have been reached."""
    name, rates = ".".join(names), _fields(report, *names[:-1]).get(names[-1])
    if not isinstance(rates, list) or not rates:
        raise InputError(f"{name}: expected acceptance rates, found {short_repr(rates)}")
    for position, rate in enumerate(rates):
        if rate is not None or not position:
            check_number(f"{name}[{position}]", rate, 0, 1)
    return theory_check.fill_unreached(rates)


def _costs(report, *names: str, above: bool = False) -> dict[int, float]:
    """Returns costs by K."""
    name, costs = ".".join(names), _fields(report, *names)
    if not costs:
        raise InputError(f"{name}: expected costs by K, found none")
    for K, cost in costs.items():
        if not K.isdecimal() or len(K) > 9:
            raise InputError(f"{name}: expected costs by K, found one of {short_repr(K)}")
        check_number(f"{name}.{K}", cost, 0, sys.float_info.max, above)
    return {int(K): cost for K, cost in costs.items()}


def _fields(tree, *names: str) -> dict:
    """Returns the fields under these names of a report. Raises InputError if there are none."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    if not isinstance(tree, dict):
        found = "none" if tree is None else short_repr(tree)
        raise InputError(f"{'.'.join(names)}: expected the fields of a report, found {found}")
    return tree
