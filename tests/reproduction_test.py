"""From a pair and tasks to tables and curves; the script that shows them."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from bad_input import one_line
from command_line import ROOT, fails_with_one_line, run, succeeds, tiny_pair
from ml_collections import ConfigDict

from spsjax.evaluation import paper, summary, theory_check
from spsjax.parallel import multihost
from spsjax.performance import microbenchmarks
from spsjax.utils import atomic_files


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    """Flags that name a tiny target and a draft."""
    return tiny_pair(tmp_path_factory.mktemp("pair"))


ROW = summary.Row(
    "warm", "ArS", 0, examples=3, texts=3, tokens=30, ms_per_token=11.0, spread_ms=1.0,
    latency_ms={50: 1.0, 90: 1.0, 99: 1.0}, tokens_per_call=1.0, ms_per_round=10.0,
)  # fmt: skip


def drafted(K, rates, tokens_per_call, ms_per_round):
    return dataclasses.replace(
        ROW, sampler="SpS", num_speculative_tokens=K, acceptance_by_position=rates,
        tokens_per_call=tokens_per_call, ms_per_round=ms_per_round,
        loop_speedup=10.0 * tokens_per_call / ms_per_round,
    )  # fmt: skip


def test_predictions_are_of_rates_at_the_largest_draft_and_of_costs():
    rows = [ROW, drafted(1, [0.9], 1.9, 12.0), drafted(3, [0.8, 0.5, None], 2.2, 20.0)]
    rates = theory_check.rates_of(rows)
    assert rates == [0.8, 0.5, None] and theory_check.filled(rates) == [0.8, 0.5, 0.5]
    costs = theory_check.Costs(10.0, {1: 0.2, 3: 0.1}, scoring={1: 1.2, 3: 1.5})
    one, three = theory_check.predict(rows, rates, costs)
    assert one.tokens_per_call == pytest.approx(1.8)
    assert one.speedup == pytest.approx(1.8 / (0.2 + 1.2))
    assert one.free == pytest.approx(1.8 / (0.2 + 1.0))
    assert one.measured == pytest.approx(10.0 / (12.0 / 1.9))
    assert three.tokens_per_call == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert three.speedup == pytest.approx(2.4 / (0.3 + 1.5))
    assert theory_check.rates_of([ROW]) == []


def test_costs_are_in_passes_of_the_target():
    base = dataclasses.replace(ROW, parts=microbenchmarks.Parts(0.0, 2.0))
    one, three = drafted(1, [0.9], 1.9, 12.0), drafted(3, [0.8] * 3, 2.2, 20.0)
    one = dataclasses.replace(one, costs=microbenchmarks.Parts(0.1, 2.0))
    three = dataclasses.replace(three, costs=microbenchmarks.Parts(0.2, 4.0))
    found = theory_check.costs_of([base, one, three])
    assert found == theory_check.Costs(2000.0, {1: 0.1, 3: 0.2}, {1: 2.0, 3: 4.0})
    assert theory_check.costs_of([base]) is None


def test_parts_are_medians_over_texts():
    parts = [
        microbenchmarks.Parts(1.0, 20.0),
        microbenchmarks.Parts(900.0, 10.0),
        microbenchmarks.Parts(2.0, 30.0),
    ]
    assert microbenchmarks.median(parts) == microbenchmarks.Parts(2.0, 20.0)


def test_tasks_without_files_are_left_out():
    fields = {
        "stdlib": {"count": 3},
        "xsum": {"path": "", "shots": "a"},
        "spec_bench": {"path": "b"},
    }
    config = ConfigDict({"tasks": fields})
    found = paper.tasks(config, ["stdlib", "spec_bench"])
    assert list(found) == ["stdlib", "spec_bench"] and found["stdlib"].count == 3
    with one_line("tasks.xsum.path", "none"):
        paper.tasks(config, ["xsum"])
    config.tasks.xsum.shots = ""
    assert list(paper.tasks(config, ["stdlib", "xsum"])) == ["stdlib"]
    with one_line("tasks.xsum.path", "none"):
        paper.tasks(config, ["xsum"])
    with one_line("tasks", "'chess'"):
        paper.tasks(config, ["chess"])


def flags(what, pair, folder, *more):
    small = f"{what}.plan.limit=2", "tasks.stdlib.lines=4", "tasks.stdlib.max_new_tokens=9"
    small = [f"--config.{flag}" for flag in (*small, "attribution=1")]
    return ["reproduce.py", f"--what={what}", f"--workdir={folder}", *pair, *small, *more]


def test_a_run_that_is_killed_goes_on(pair, tmp_path):
    arguments = flags("figure1", pair, tmp_path, "--config.figure1.num_speculative_tokens=2")
    journal = tmp_path / "stdlib.jsonl"
    program = [sys.executable, str(ROOT / "scripts" / arguments[0]), *arguments[1:]]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL) as process:
        while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    before = journal.read_bytes()
    before = before[: before.rindex(b"\n") + 1]
    assert before.count(b"\n") >= 3
    result = succeeds(*arguments)
    assert journal.read_bytes().startswith(before)
    records = [json.loads(line) for line in journal.read_text("utf-8").splitlines()[1:]]
    keys = {(r["example"], r["num_speculative_tokens"]) for r in records}
    assert len(records) == len(keys) == 2 * 2  # none twice, none missing
    for text in ("stdlib: time", "next line", "by theory", "where drafts are accepted"):
        assert text in result.stdout.replace("\n", " ")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # nothing but itself
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    rows = report["tasks"]["stdlib"]["rows"]
    assert [row["num_speculative_tokens"] for row in rows] == [0, 2]
    predicted = succeeds("predict.py", f"--measured={tmp_path / 'report.json'}").stdout
    assert predicted.count("best:") == 2 and "stdlib, nucleus" in predicted


REQUESTS = (
    {"question_id": 1, "category": "qa", "turns": ["def f(x): <script>alert(1)</script>"]},
    {"question_id": 2, "category": "math", "turns": ["import os", "return x"]},
)


def test_spec_bench_has_figures_of_each_category(pair, tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in REQUESTS))
    more = f"--config.tasks.spec_bench.path={path}", "--config.tasks.spec_bench.max_new_tokens=5"
    workdir = tmp_path / "run"
    result = succeeds(*flags("specbench", pair, workdir, *more))
    assert "spec_bench, qa: time" in result.stdout
    found = json.loads((workdir / "report.json").read_text("utf-8"))["tasks"]["spec_bench"]
    assert list(found["groups"]) == ["qa", "multi-turn conversation"]
    assert [row["texts"] for row in found["groups"]["multi-turn conversation"]] == [2, 2]
    page = (workdir / "report.html").read_text("utf-8")
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    # The same with anything else is another run.
    meshed = run(*flags("specbench", pair, workdir, *more, "--config.mesh.model=2"), path=tmp_path)
    fails_with_one_line(meshed, "spec_bench.jsonl", "expected mesh")
    path.write_text(path.read_text().replace("import os", "import re"))
    edited = run(*flags("specbench", pair, workdir, *more), path=tmp_path)
    fails_with_one_line(edited, "spec_bench.jsonl", "expected examples")


def test_one_process_at_a_time(tmp_path):
    with atomic_files.lock(tmp_path / ".lock"), one_line(str(tmp_path), "another process"):
        multihost.lock_folder(tmp_path)


def test_figure_1_is_of_our_samplers(tmp_path, monkeypatch):
    """Others run beside, and do not say how often they called the target."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from spsjax.cli import plots

    other = dataclasses.replace(
        ROW, sampler="HF plain f32", tokens_per_call=None, ms_per_round=None
    )
    rows = [ROW, drafted(1, [0.9], 1.9, 12.0), drafted(3, [0.8, 0.5, None], 2.2, 20.0), other]
    costs = theory_check.Costs(10.0, {1: 0.2, 3: 0.1}, scoring={1: 1.2, 3: 1.5})
    predicted = theory_check.predict(rows, [0.8, 0.5, 0.5], costs)
    found = paper.Found(
        rows,
        {},
        0,
        {"warm": costs},
        {"warm": [0.8, 0.5, None]},
        {"warm": predicted},
        {},
        {},
        {},
        {},
    )
    drawn = []
    real = plots.panels

    @contextlib.contextmanager
    def panels(*args, **options):
        with real(*args, **options) as axes:
            yield axes
            drawn.extend(axes[0])

    monkeypatch.setattr(plots, "panels", panels)
    plots.figure1({"stdlib": found}, 100, tmp_path / "figure1.png")
    time, filled, loop = (
        [line.get_xydata().tolist() for line in axis.lines if len(line.get_xdata())]
        for axis in drawn
    )
    assert filled[0] == [[1, 0.95], [3, 0.55]] and loop[0] == [[0, 10], [1, 12], [3, 20]]
    theory = [[1, 10 * (0.2 + 1.2)], [3, 10 * (0.3 + 1.5)]]
    np.testing.assert_allclose(loop[1], theory)
    prompts = [11.0 - 12.0 / 1.9, 11.0 - 20.0 / 2.2]  # what a token takes beside the loop
    expected = [100 * (each + 10 / row.speedup) for each, row in zip(prompts, predicted)]
    np.testing.assert_allclose(np.asarray(time[-1])[:, 1], expected)


def test_prompt_lookup_drafts_too_and_greedy_texts_are_the_same(pair, tmp_path):
    succeeds(*flags("table1", pair, tmp_path, "--config.drafter=ngram"))
    found = json.loads((tmp_path / "report.json").read_text("utf-8"))["tasks"]["stdlib"]
    assert found["costs"] == {} and found["partings"] == {"greedy": {"SpS, K = 4": [2, []]}}
    assert [row["setting"] for row in found["rows"]] == ["nucleus"] * 2 + ["greedy"] * 2
    assert found["rows"][3]["chances"]["next line"] == 1


@pytest.mark.parametrize(
    "flag, named",
    [
        ("--config.table1.plan.settings=cold", "settings: expected"),
        ("--config.table1.plan.samples=0", "samples: expected"),
        ("--config.tasks.xsum.path=nosuch", "shots"),
        ("--config.tasks.stdlib.max_new_tokens=0", "max_new_tokens"),
        ("--config.tasks.human_eval.path=nosuch", "nosuch"),
        ("--config.table1.num_speculative_tokens=()", "num_speculative_tokens"),
    ],
)
def test_a_mistake_is_one_line(pair, tmp_path, flag, named):
    result = run(*flags("table1", pair, tmp_path / "out", flag), path=tmp_path)
    fails_with_one_line(result, named)
    assert not (tmp_path / "out").exists()


def test_what_theory_expects(tmp_path):
    times = "--draft_ms=1.8", "--target_ms=14.1"
    shown = succeeds("predict.py", "--acceptance=0.8", *times, "--most=6").stdout
    assert "best: K = 5, 2.25 x plain sampling" in shown  # by hand: 3.689 / (5 * 1.8 / 14.1 + 1)
    plot = tmp_path / "plot.png"
    shown = succeeds("predict.py", "--acceptance=0.1,0.1", *times, f"--plot={plot}").stdout
    assert "no K is faster" in shown and plot.read_bytes().startswith(b"\x89PNG")
    for odd in ("--draft_ms=nan", "--target_ms=inf"):
        fails_with_one_line(run("predict.py", "--acceptance=0.8", *times, odd), odd[:6], "millisec")
    result = run("predict.py", "--acceptance=2", *times, path=tmp_path)
    fails_with_one_line(result, "acceptance", "[0, 1]")
