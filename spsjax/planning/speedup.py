"""Predicted speed-up over K, and the best K, from acceptance rates and costs.

Rates and costs are given by a config, or by a `report.json` of scripts/reproduce.py.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spsjax.errors import InputError, check_integer, check_number, one_line, short_repr
from spsjax.planning import theory, trees
from spsjax.planning.outcome import Outcome, Table

_MOST_K, _MOST_NODES = 1000, 256  # the time of a table grows with their squares
_LONGEST = 1e30  # milliseconds
_HEADER = "K", "tokens per call", "speed-up", "target's arithmetic per token"


@dataclasses.dataclass(frozen=True)
class Case:
    """Acceptance rates by position, and costs in passes of the target over one token."""

    rates: Sequence[float]  # acceptance rate of every position up to the greatest K
    draft_cost: Callable[[int], float]  # cost per draft token, by K
    scoring_cost: Callable[[int], float]  # cost of the pass over K + 1 tokens, by K

    def curve(self) -> dict[int, tuple[float, float, float]]:
        """Returns tokens per call, speed-up and operations per token, by K."""
        return {
            K: (
                theory.block_efficiency(self.rates, K),
                theory.speedup(self.rates, K, self.draft_cost(K), self.scoring_cost(K)),
                theory.operations(self.rates, K, 0.0),
            )
            for K in range(1, len(self.rates) + 1)
        }

    def best(self) -> str:
        """Returns a line about the fastest K."""
        K, speedup = theory.best_num_speculative_tokens(
            self.rates, self.draft_cost, self.scoring_cost, len(self.rates)
        )
        return f"K = {K}, {speedup:.2f} x plain sampling" if K else "plain sampling; no K is faster"


def plan(config) -> Outcome:
    """Returns the speed-up over K for the rates and costs of a config.

    `config` is configs/experiments/plan_speedup.py. With `children` trees are predicted, with
    `report` the cases of a report. Raises InputError for a value of the config or a figure of the
    report that cannot be used.
    """
    if config.children:
        return _plan_trees(config)
    cases = _report_cases(config.report) if config.report else {"": _config_case(config)}
    curves = {name: case.curve() for name, case in cases.items()}
    tables = []
    for name, curve in curves.items():
        rows = [(K, *(f"{figure:.2f}" for figure in figures)) for K, figures in curve.items()]
        tables.append(Table(name, _HEADER, rows, f"best: {cases[name].best()}"))
    return Outcome(tables, curves, plot="predicted")


def _plan_trees(config) -> Outcome:
    """Returns the best tree per size."""
    rates, drafting, one = _rates(config, "children"), *_pass_times(config)
    if sum(rates) > 1 + 1e-6:  # at most one child is accepted
        raise InputError(f"children: expected rates with a sum of at most 1, found {sum(rates):g}")
    check_number("row_ms", config.row_ms, 0, _LONGEST)
    trees.check_sizes(config.num_nodes, _MOST_NODES)
    plans = trees.plans(
        rates,
        config.num_nodes,
        lambda _: drafting / one,
        lambda count: 1 + config.row_ms * (count - 1) / one,
    )
    best = max(plans, key=lambda name: plans[name].speedup)
    summary = f"best: {best}, {plans[best].speedup:.2f} x plain sampling"
    speedups = {name: plan.speedup for name, plan in plans.items()}
    return Outcome([trees.table(plans, one)], speedups, summary)


def _config_case(config) -> Case:
    rates, drafting, one = _rates(config, "acceptance"), *_pass_times(config)
    check_integer("most_tokens", config.most_tokens, 1, _MOST_K)
    rates = rates if len(rates) > 1 else rates * config.most_tokens
    return Case(rates, lambda K: drafting / one, lambda K: 1.0)


def _pass_times(config) -> tuple[float, float]:
    """Returns the milliseconds per draft token and per pass of the target."""
    check_number("draft_ms", config.draft_ms, 0, _LONGEST)
    check_number("target_ms", config.target_ms, 0, _LONGEST, above=True)
    return config.draft_ms, config.target_ms


def _rates(config, field: str) -> list[float]:
    """Returns acceptance rates of a config."""
    _check_count(field, config[field])
    for rate in config[field]:
        check_number(field, rate, 0, 1)
    return list(config[field])


def _check_count(name: str, rates: Sequence[float]) -> None:
    if not 1 <= len(rates) <= _MOST_K:
        raise InputError(f"{name}: expected 1 to {_MOST_K} rates, found {len(rates)}")


def _report_cases(path: str) -> dict[str, Case]:
    """Returns the cases of a report: rates by position, and one rate for all positions."""
    cases = {}
    try:
        report = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        for task, figures in report["tasks"].items():
            for setting, costs in figures["draft"]["costs"].items():
                rates = figures["draft"]["acceptance_by_position"][setting]
                cases |= _measured_cases(f"{task}, {setting}", rates, costs)
    except InputError as error:
        raise InputError(f"report: {path}: {error}") from None
    except OSError as error:
        raise InputError(f"report: {path}: expected a file, found {one_line(error)}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"report: {path}: expected a report.json of reproduce.py, found "
            f"{type(error).__name__}: {one_line(error)}"
        ) from None
    if not cases:
        raise InputError(
            f"report: {path}: expected costs of a draft model's rounds, found none. "
            "Reproduce with plan.timed above 0."
        )
    return cases


def _measured_cases(name: str, rates: Sequence[float | None], costs: Mapping) -> dict[str, Case]:
    _check_count(f"{name}: acceptance_by_position", rates)
    rates = theory.fill_unreached(rates)
    drafting = _costs(f"{name}: draft_step", costs["draft_step"])
    # Theorem 3.8 divides by the cost of a round, of which drafting may be a free part.
    scoring = {0: 1.0} | _costs(f"{name}: scoring", costs["scoring"], above=True)
    case = Case(rates, _between(drafting), _between(scoring))
    mean = theory.rate_of(theory.block_efficiency(rates, len(rates)), len(rates))
    alike = dataclasses.replace(case, rates=[mean] * len(rates))
    return {name: case, f"{name}, all positions at {mean:.3f}": alike}


def _costs(name: str, costs: Mapping[str, float], above: bool = False) -> dict[int, float]:
    """Returns costs by K."""
    if not costs:
        raise InputError(f"{name}: expected costs by K, found none")
    for K, cost in costs.items():
        check_number(f"{name}.{short_repr(K)}", cost, 0, sys.float_info.max, above)
    return {int(K): cost for K, cost in costs.items()}


def _between(costs: Mapping[int, float]) -> Callable[[int], float]:
    """Returns the cost as a function of K, linear between the values of K that were measured."""
    counts = sorted(costs)
    return lambda K: float(np.interp(K, counts, [costs[count] for count in counts]))
