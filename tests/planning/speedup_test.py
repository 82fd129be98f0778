"""The plan of a speed-up: figures by hand, and reports of reproduce.py, sound and damaged."""

import json
import runpy

import pytest
from helpers.bad_input import one_line
from helpers.environment import ROOT

from spsjax.planning import speedup

COSTS = {"draft_step": {"4": 0.1, "2": 0.2}, "scoring": {"4": 1.5}}
CONFIG = ROOT / "configs" / "experiments" / "plan_speedup.py"


def plan(**fields):
    config = runpy.run_path(str(CONFIG))["get_config"]()
    config.update(fields)
    return speedup.plan(config)


def report(rates=(0.5, None), **figures):
    draft = {"costs": {"s": COSTS | figures}, "acceptance_by_position": {"s": rates}}
    return {"tasks": {"a": {"draft": draft}}}


def written(folder, value) -> str:
    path = folder / "report.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_best_k_follows_from_one_rate_or_from_rates_by_position():
    """By hand: 3.689 / (5 * 1.8 / 14.1 + 1), with the config's rate and times."""
    (table,) = plan(most_tokens=6).tables
    assert len(table.rows) == 6 and table.note == "best: K = 5, 2.25 x plain sampling"
    (table,) = plan(acceptance=(0.1, 0.1)).tables
    assert len(table.rows) == 2 and "no K is faster" in table.note


@pytest.mark.parametrize(
    ("row_ms", "best", "expected"), [(0.5, "tree of 2", 1.9 / 11.5), (20, "chain", 1.96 / 51)]
)
def test_tree_pays_where_rows_are_cheap(row_ms, best, expected):
    """By hand: two children, or a child and its child, for one or two draft steps of 0.5."""
    times = {"draft_ms": 0.5, "target_ms": 10.0, "row_ms": float(row_ms)}
    outcome = plan(children=(0.6, 0.3), num_nodes=(2,), **times)
    assert outcome.summary.startswith(f"best: {best}, ")
    assert outcome.figures["tree of 2"] == pytest.approx(10 * expected)


def test_report_gives_rates_and_costs_by_setting(tmp_path):
    """An unreached position has the rate before it; costs are linear between measured K."""
    outcome = plan(report=written(tmp_path, report()))
    by_position, alike = outcome.figures.values()
    assert list(outcome.figures) == ["a, s", "a, s, all positions at 0.500"]
    tokens, faster, _ = by_position[2]
    assert (tokens, faster) == pytest.approx((1.75, 1.75 / (2 * 0.2 + 1.25)))
    assert alike[2][0] == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("damaged", "fragments"),
    [
        (report(rates=[]), ["a, s: acceptance_by_position", "found 0"]),
        (report(rates=0.5), ["expected a report.json of reproduce.py"]),
        (report(rates=[0.5, float("nan")]), ["expected numbers in [0, 1]", "nan"]),
        (report(rates=[None, 0.5]), ["expected a report.json of reproduce.py"]),
        (report(draft_step={}), ["a, s: draft_step: expected costs by K, found none"]),
        (report(draft_step={"4": "x"}), ["a, s: draft_step.'4': expected", "found 'x'"]),
        (report(draft_step={"K": 0.1}), ["expected a report.json of reproduce.py", "'K'"]),
        (report(scoring={"4": 0}), ["a, s: scoring.'4': expected", "above 0", "found 0"]),
        ({"tasks": {"a": {}}}, ["expected a report.json of reproduce.py", "'draft'"]),
        ({"tasks": {"a": {"draft": {"costs": {}}}}}, ["found none", "plan.timed above 0"]),
        ([], ["expected a report.json of reproduce.py"]),
        ("[" * 100_000, ["expected a report.json of reproduce.py"]),
    ],
)
def test_damaged_report_is_one_line(tmp_path, damaged, fragments):
    with one_line("report.json: ", *fragments):
        plan(report=written(tmp_path, damaged))


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        ({"acceptance": ("x",)}, ["acceptance", "found 'x'"]),
        ({"acceptance": (0.5,) * 1001}, ["acceptance", "1 to 1000 rates, found 1001"]),
        ({"most_tokens": 10**8}, ["most_tokens", "from 1 to 1000"]),
        ({"target_ms": float("inf")}, ["target_ms", "found inf"]),
        ({"target_ms": 0.0}, ["target_ms", "above 0"]),
        ({"children": (2.0,)}, ["children", "found 2.0"]),
        ({"children": (0.5,), "row_ms": -1.0}, ["row_ms", "found -1.0"]),
        ({"children": (0.5,), "num_nodes": (257,)}, ["num_nodes", "from 1 to 256"]),
    ],
)
def test_bad_value_is_one_line(fields, fragments):
    with one_line(*fragments):
        plan(**fields)
