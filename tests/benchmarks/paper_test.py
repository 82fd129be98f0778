"""Reproduction of the literature: predictions, reports, and the scripts that show them."""

import contextlib
import dataclasses
import json
import re
import time

import numpy as np
import pytest
from helpers.bad_input import one_line
from helpers.command_line import ROOT, Script, fails_with_one_line, run, succeeds
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model
from ml_collections import ConfigDict

from spsjax.benchmarks import microbenchmarks, paper, task_workloads, theory_check
from spsjax.benchmarks.summary import SystemSummary
from spsjax.benchmarks.systems import Role
from spsjax.cli import paper_plots

ARS = SystemSummary(
    "warm", "ArS", 0, Role.BASELINE, num_examples=3, num_texts=3, num_tokens=30, ms_per_token=11.0,
    ms_per_token_std=1.0, latency_ms={50: 1.0, 90: 1.0, 99: 1.0}, block_efficiency=1.0,
    ms_per_round=10.0,
)  # fmt: skip


def drafted(K, rates, block_efficiency, ms_per_round):
    return dataclasses.replace(
        ARS, system="SpS", role=Role.SPECULATIVE, num_speculative_tokens=K,
        acceptance_by_position=rates, block_efficiency=block_efficiency, ms_per_round=ms_per_round,
        loop_speedup=10.0 * block_efficiency / ms_per_round,
    )  # fmt: skip


def test_predict_uses_rates_at_the_largest_k():
    systems = [ARS, drafted(1, [0.9], 1.9, 12.0), drafted(3, [0.8, 0.5, None], 2.2, 20.0)]
    rates = theory_check.acceptance_rates(systems)
    assert rates == [0.8, 0.5, None]
    costs = theory_check.LoopCosts(10.0, {1: 0.2, 3: 0.1}, scoring={1: 1.2, 3: 1.5})
    one, three = theory_check.predict(systems, rates, costs)
    assert one.block_efficiency == pytest.approx(1.8)
    assert one.cost_aware_speedup == pytest.approx(1.8 / (0.2 + 1.2))
    assert one.predicted_speedup == pytest.approx(1.8 / (0.2 + 1.0))
    assert one.loop_speedup == pytest.approx(10.0 / (12.0 / 1.9))
    assert three.block_efficiency == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert three.cost_aware_speedup == pytest.approx(2.4 / (0.3 + 1.5))
    assert theory_check.acceptance_rates([ARS]) == []


def test_loop_costs_are_in_passes_of_the_target():
    base = dataclasses.replace(ARS, round_cost=microbenchmarks.RoundCost(0.0, 2.0))
    one, three = drafted(1, [0.9], 1.9, 12.0), drafted(3, [0.8] * 3, 2.2, 20.0)
    one = dataclasses.replace(one, relative_cost=microbenchmarks.RoundCost(0.1, 2.0))
    three = dataclasses.replace(three, relative_cost=microbenchmarks.RoundCost(0.2, 4.0))
    costs = theory_check.loop_costs([one, base, three])
    assert costs == theory_check.LoopCosts(2000.0, {1: 0.1, 3: 0.2}, {1: 2.0, 3: 4.0})
    assert theory_check.loop_costs([base]) is None


def test_median_of_round_costs_is_part_by_part():
    costs = ((1.0, 20.0), (900.0, 10.0), (2.0, 30.0))
    median = microbenchmarks.median([microbenchmarks.RoundCost(*cost) for cost in costs])
    assert median == microbenchmarks.RoundCost(2.0, 20.0)


def test_load_tasks_leaves_out_tasks_without_files():
    fields = {
        "stdlib": {"count": 3}, "xsum": {"path": "", "shots": "a"}, "spec_bench": {"path": "b"},
    }  # fmt: skip
    config = ConfigDict({"tasks": fields})
    tasks = task_workloads.load_tasks(config, ["stdlib", "spec_bench"])
    assert list(tasks) == ["stdlib", "spec_bench"] and tasks["stdlib"].count == 3
    with one_line("tasks.xsum.path", "none"):
        task_workloads.load_tasks(config, ["xsum"])
    config.tasks.xsum.shots = ""
    assert list(task_workloads.load_tasks(config, ["stdlib", "xsum"])) == ["stdlib"]
    with one_line("tasks.xsum.path", "none"):
        task_workloads.load_tasks(config, ["xsum"])
    with one_line("tasks", "'chess'"):
        task_workloads.load_tasks(config, ["chess"])


def flags(experiment, pair, folder, *more):
    small = f"{experiment}.plan.limit=2", "tasks.stdlib.lines=4", "tasks.stdlib.max_new_tokens=9"
    small += ("analysed_texts=1",)
    if not any(".num_speculative_tokens=" in flag for flag in more):  # a second one adds to it
        small += (f"{experiment}.num_speculative_tokens=2",)
    run = f"--experiment={experiment}", f"--workdir={folder}"
    return ["reproduce.py", *run, *pair, *(f"--config.{flag}" for flag in small), *more]


@pytest.mark.process
def test_reproduce_after_a_kill_resumes(pair, tmp_path):
    arguments = flags("figure1", pair, tmp_path)
    journal = tmp_path / "stdlib.jsonl"
    process = Script(*arguments)
    while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.wait()
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = journal.read_bytes()
    before = before[: before.rindex(b"\n") + 1]
    assert before.count(b"\n") >= 3
    result = succeeds(*arguments)
    assert journal.read_bytes().startswith(before)
    records = [json.loads(line) for line in journal.read_text("utf-8").splitlines()[1:]]
    keys = {(r["example"], r["num_speculative_tokens"]) for r in records}
    assert len(records) == len(keys) == 2 * 2  # no record twice, and none missing
    for text in ("stdlib: time", "next line", "by theory", "where drafts are accepted"):
        assert text in result.stdout.replace("\n", " ")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # the page refers to no other file
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    systems = report["tasks"]["stdlib"]["systems"]
    assert [system["num_speculative_tokens"] for system in systems] == [0, 2]
    flag = f"--config.report={tmp_path / 'report.json'}"
    predicted = succeeds("plan.py", flag).stdout
    assert predicted.count("best:") == 2 and "stdlib, nucleus" in predicted
    config = json.loads((tmp_path / "experiment.json").read_text("utf-8"))
    assert config["figure1"]["num_speculative_tokens"] == [2] and "seed:" not in result.stdout
    assert f"The whole config is in {tmp_path / 'experiment.json'}\n" in result.stdout
    assert "stdlib: sampling: 4/4 in " in result.stderr
    another = "experiment 'table1', found a journal with 'figure1'. Restore the value or"
    fails_with_one_line(run(*flags("table1", pair, tmp_path)), "stdlib.jsonl", another)
    drafter = "expected drafter 'ngram', found a journal with 'model'. Restore"
    fails_with_one_line(run(*arguments, "--config.drafter=ngram"), drafter)
    name = pair[0].removeprefix("--target=")
    fails_with_one_line(run(*arguments, f"--draft={name}"), f"expected draft '{name}', found a")


def test_identity_of_other_weights_differs_in_one_field():
    """A model may get other weights under its name: the journal's message then names them alone."""
    target = numpy_spread_model(48)
    one, other = map(paper._identity, (target, numpy_nearby_model(target)))
    assert [name for name in one if one[name] != other[name]] == ["weights"]


REQUESTS = (
    {"question_id": 1, "category": "qa", "turns": ["def f(x): <script>alert(1)</script>"]},
    {"question_id": 2, "category": "math", "turns": ["import os", "return x"]},
)


@pytest.mark.slow
def test_reproduce_spec_bench_reports_each_category(pair, tmp_path):
    """Its report has figures per category, all explained columns, and escaped texts."""
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in REQUESTS))
    more = f"--config.tasks.spec_bench.path={path}", "--config.tasks.spec_bench.max_new_tokens=9"
    workdir = tmp_path / "run"
    result = succeeds(*flags("specbench", pair, workdir, *more))
    assert "spec_bench, qa: time" in result.stdout
    report = json.loads((workdir / "report.json").read_text("utf-8"))["tasks"]["spec_bench"]
    assert list(report["groups"]) == ["qa", "multi-turn conversation"]
    conversation = report["groups"]["multi-turn conversation"]
    assert [system["num_texts"] for system in conversation] == [2, 2]
    page = (workdir / "report.html").read_text("utf-8")
    document = (ROOT / "docs" / "reproductions" / "paper.md").read_text("utf-8")
    section = re.search(r"(?s)## How to read a report\n(.*?)\n## ", document)[1]
    explained = re.findall(r"(?m)^\| (.+?) \|", section)[1:]
    assert {*explained} <= {*re.findall("<th>(.*?)</th>", page)} and len(explained) == 9
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    # With another mesh or other prompts it is another run.
    meshed = run(*flags("specbench", pair, workdir, *more, "--config.mesh.model=2"), path=tmp_path)
    fails_with_one_line(meshed, "spec_bench.jsonl", "expected mesh")
    path.write_text(path.read_text().replace("import os", "import re"))
    edited = run(*flags("specbench", pair, workdir, *more), path=tmp_path)
    fails_with_one_line(edited, "spec_bench.jsonl", "expected examples")


def test_figure1_draws_the_baseline_and_speculative_systems(tmp_path, monkeypatch):
    """Peers are left out of figure 1, because they do not report their target calls."""
    peer = dataclasses.replace(
        ARS, system="HF plain f32", role=Role.PEER, block_efficiency=None, ms_per_round=None
    )
    systems = [ARS, drafted(1, [0.9], 1.9, 12.0), drafted(3, [0.8, 0.5, None], 2.2, 20.0), peer]
    costs = theory_check.LoopCosts(10.0, {1: 0.2, 3: 0.1}, scoring={1: 1.2, 3: 1.5})
    predictions = theory_check.predict(systems, [0.8, 0.5, 0.5], costs)
    rates = {"warm": [0.8, 0.5, None]}
    draft = paper.DraftAnalysis({"warm": costs}, rates, {"warm": predictions})
    report = paper.TaskReport(systems, {}, 0, draft, {}, {})
    drawn = []
    real = paper_plots.panels

    @contextlib.contextmanager
    def panels(*args, **options):
        with real(*args, **options) as axes:
            yield axes
            drawn.extend(axes[0])

    monkeypatch.setattr(paper_plots, "panels", panels)
    paper_plots.figure1({"stdlib": report}, 100, tmp_path / "figure1.png")
    time, efficiency, loop = (
        [line.get_xydata().tolist() for line in axis.lines if len(line.get_xdata())]
        for axis in drawn
    )
    assert efficiency[0] == [[1, 0.95], [3, 0.55]] and loop[0] == [[0, 10], [1, 12], [3, 20]]
    np.testing.assert_allclose(loop[1], [[1, 10 * (0.2 + 1.2)], [3, 10 * (0.3 + 1.5)]])
    prompts = [11.0 - 12.0 / 1.9, 11.0 - 20.0 / 2.2]  # time per token outside the loop
    loops = [10 / prediction.cost_aware_speedup for prediction in predictions]
    np.testing.assert_allclose(np.asarray(time[-1])[:, 1], 100 * np.add(prompts, loops))


@pytest.mark.slow
def test_reproduce_with_prompt_lookup_has_equal_greedy_texts(pair, tmp_path):
    succeeds(*flags("table1", pair, tmp_path, "--config.drafter=ngram"))
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))["tasks"]["stdlib"]
    assert report["draft"]["costs"] == {}
    system = {"system": "SpS", "num_speculative_tokens": 2}
    assert report["divergences"] == {"greedy": [system | {"num_texts": 2, "divergences": []}]}
    systems = report["systems"]
    assert [system["setting"] for system in systems] == ["nucleus"] * 2 + ["greedy"] * 2
    assert systems[3]["p_values"]["next line"] == 1 and systems[3]["same_tokens"] is True
    lookup = "--config.drafter=ngram", "--config.ngram.max_ngram=2"
    options = "expected drafter ngram {'max_ngram': 2}, found a journal with {'max_ngram': 3}."
    fails_with_one_line(run(*flags("table1", pair, tmp_path, *lookup)), options)


@pytest.mark.parametrize(
    "flag, named",
    [
        ("--config.table1.plan.samples=0", "samples: expected"),
        ("--config.tasks.xsum.path=nosuch", "shots"),
        ("--config.tasks.human_eval.path=nosuch", "nosuch"),
        ("--config.table1.num_speculative_tokens=(2,2)", "table1.num_speculative_tokens: expected"),
        ("--config.table1.num_speculative_tokens=(1,256)", "expected an integer in [0, 256)"),
    ],
)
def test_reproduce_answers_a_mistake_with_one_line(pair, tmp_path, flag, named):
    result = run(*flags("table1", pair, tmp_path / "out", flag), path=tmp_path)
    fails_with_one_line(result, named)
    assert not (tmp_path / "out").exists() and not result.stdout


def test_reproduce_checks_its_outputs_first(tmp_path):
    """An output that cannot be written is found before a model is loaded; nothing is promised."""
    (tmp_path / "file").touch()
    (tmp_path / "run" / "report.json").mkdir(parents=True)
    for folder, piece in (("run", "report.json: expected a file"), ("file", "expected a folder")):
        result = run(*flags("table1", ["--target=nosuch"], tmp_path / folder), path=tmp_path)
        fails_with_one_line(result, f"{piece} or nothing, found")
        assert not result.stdout
