"""Reports that predict.py reads: their figures, and what a damaged one is answered with."""

import json

import pytest
from helpers.bad_input import one_line
from helpers.command_line import fails_with_one_line, run

from spsjax.evaluation import report_file

FIGURES = {"draft_step": {"4": 0.1, "2": 0.2}, "scoring": {"4": 1.5}}


def report(rates=(0.5, None), **figures):
    """Returns a report of one task and one setting."""
    draft = {"costs": {"s": FIGURES | figures}, "acceptance_by_position": {"s": rates}}
    return {"tasks": {"a": {"draft": draft}}}


def written(folder, value):
    path = folder / "report.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_report_has_rates_and_costs_by_setting(tmp_path):
    """Costs are by K; an unreached position has the rate before it; n-grams have no costs."""
    measured = report_file.Measured([0.5, 0.5], {4: 0.1, 2: 0.2}, {4: 1.5})
    assert report_file.read(written(tmp_path, report())) == {"a, s": measured}
    assert report_file.read(written(tmp_path, {"tasks": {"a": {"draft": {"costs": {}}}}})) == {}


RATES, COSTS = "tasks.a.draft.acceptance_by_position.s", "tasks.a.draft.costs.s"


@pytest.mark.parametrize(
    ("damaged", "fragments"),
    [
        (report(rates=[]), [RATES, "expected acceptance rates, found []"]),
        (report(rates=0.5), [RATES, "found 0.5"]),
        (report(rates=[5.0, None]), [f"{RATES}[0]: expected a finite number", "found 5.0"]),
        (report(rates=[0.5, float("nan")]), [f"{RATES}[1]", "found nan"]),
        (report(rates=[None, 0.5]), [f"{RATES}[0]", "found None"]),
        (report(draft_step={}), [f"{COSTS}.draft_step: expected costs by K, found none"]),
        (report(draft_step={"4": "x"}), [f"{COSTS}.draft_step.4: expected", "found 'x'"]),
        (report(draft_step={"4": -0.1}), [f"{COSTS}.draft_step.4: expected", "found -0.1"]),
        (report(draft_step={"K": 0.1}), [f"{COSTS}.draft_step: expected", "found one of 'K'"]),
        (report(scoring={"4": 0}), [f"{COSTS}.scoring.4: expected", "above 0", "found 0"]),
        (report(scoring={"4": float("inf")}), [f"{COSTS}.scoring.4: expected", "found inf"]),
        (report(scoring=[1.0]), [f"{COSTS}.scoring: expected the fields", "found [1.0]"]),
        ({"tasks": {"a": {}}}, ["tasks.a.draft.costs: expected the fields", "found none"]),
        ([], ["tasks: expected the fields of a report, found none"]),
        ("{", ["expected a report.json of reproduce.py, found"]),
        ("[" * 100_000, ["expected a report.json of reproduce.py, found"]),
    ],
)
def test_damaged_report_names_the_field(tmp_path, damaged, fragments):
    """The message names the file, the field and its value."""
    with one_line("report.json: ", *fragments):
        report_file.read(written(tmp_path, damaged))


def test_predict_of_a_damaged_report_prints_no_table(tmp_path):
    """Every setting is checked before the first table is printed."""
    damaged = report()
    damaged["tasks"]["b"] = report(rates=[])["tasks"]["a"]
    result = run("predict.py", f"--report={written(tmp_path, damaged)}")
    fails_with_one_line(result, "tasks.b.draft.acceptance_by_position.s")
    assert not result.stdout


@pytest.mark.parametrize(
    ("flags", "piece"),
    [
        (["--acceptance=0.8", "--max_k=100000000"], "--max_k=100000000"),
        (["--acceptance=" + "1," * 1000 + "1"], "--acceptance: expected at most 1000 rates"),
    ],
)
def test_predict_over_too_many_k_is_refused(flags, piece):
    """The time of the table grows with the square of the largest K."""
    result = run("predict.py", *flags, "--draft_ms=1", "--target_ms=10")
    fails_with_one_line(result, piece)
