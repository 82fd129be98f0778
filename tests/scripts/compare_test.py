"""compare.py as users run it: drafters, verifiers, drafts and weights."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from helpers.command_line import ROOT, fails_with_one_line, launch, run, settings, succeeds
from helpers.numpy_models import drawn
from helpers.tiny_training import config, untrained_target

import spsjax
from spsjax import loading
from spsjax.benchmarks import verifier_comparison
from spsjax.drafters import medusa
from spsjax.training.tasks.features import build_drafter

FOLDER = ROOT / "configs" / "experiments"
VERIFIERS, WEIGHTS = (f"--config={FOLDER}/compare_{name}.py" for name in ("verifiers", "weights"))
RULES = settings(prompts=2, prompt_tokens=10, max_new_tokens=6, most_children=2)
DRAFTERS = settings(
    prompts=2, prompt_tokens=10, max_new_tokens=8, chains=3, branching="((2,1),)",
    dynamic="((4,2,2),)", run_settings="('cold','greedy')",
)  # fmt: skip


@pytest.fixture(scope="module")
def drafters(texts, tmp_path_factory) -> tuple[pathlib.Path, tuple[str, ...]]:
    """A folder, and flags that compare three drafters, of which one has a tree of its own."""
    folder = tmp_path_factory.mktemp("comparison")
    target = untrained_target(texts, tmp_path_factory.getbasetemp())
    model = spsjax.load(target)
    eagle3 = build_drafter(config("eagle3", texts, target).drafter, model.config)
    medusa_heads = medusa.Drafter(model.config, num_heads=2)
    for name, drafter in (("eagle3", eagle3), ("medusa", medusa_heads)):
        params = drawn(drafter.param_shapes(np.float32), 0, 0.2)
        for key in drafter.constants:  # the tokens that can be drafted: all
            params[key] = np.arange(len(params[key]), dtype=np.int32)
        spsjax.save_drafter(folder / name, loading.LoadedDrafter("", drafter, params), model)
    tree = folder / "tree.json"
    tree.write_text('{"parents": [0, 0, 2], "replacement": false, "chosen": true}', "utf-8")
    heads = f"EAGLE-3={folder}/eagle3,look up=ngram,Medusa={folder / 'medusa'}"
    source = f"--config.data.train=('{texts}',)", f"--target={target}"
    flags = *source, *DRAFTERS, f"--drafters={heads}", f"--workdir={folder}"
    return folder, flags


@pytest.mark.slow
def test_drafters_shows_every_drafter_in_every_shape(drafters):
    folder, flags = drafters
    more = f"--trees=Medusa={folder / 'tree.json'}", "--verifiers=Medusa=typical"
    shown = succeeds("compare.py", *flags, *more).stdout
    assert (folder / "table.png").stat().st_size and (folder / "table.md").read_text() in shown
    rows = json.loads((folder / "table.json").read_text("utf-8"))["rows"]
    shapes = {
        "EAGLE-3": ["chain of 3", "tree of 4 (2-1)", "dynamic tree of 4 (2 x 2)"],
        "look up": ["chain of 3"],
        "Medusa": ["tree of 4 (2-1)", "dynamic tree of 4 (2 x 2)", "own tree of 3"],
    }
    for setting in ("cold", "greedy"):
        for name, expected in shapes.items():
            own = [row for row in rows if (row["setting"], row["drafter"]) == (setting, name)]
            lossless = [row for row in own if row["rule"] is None]
            assert [row["shape"] for row in lossless] == expected
            lossy = [row["shape"] for row in own if row["rule"] == "typical"]
            assert lossy == (expected if name == "Medusa" else [])
            assert {row["tokens"] for row in own} == {16}
            assert all((row["surprise"] is None) == (setting == "greedy") for row in own)
            for row in lossless:
                assert 1 <= row["tokens_per_call"] <= 4 and row["speedup"] > 0
                assert row["ms_per_draft"] > 0
            assert (lossless[0]["bytes"] == 0) == (name == "look up")
            assert {row["same_tokens"] for row in lossless} == {setting == "greedy" or None}
            # The look-up may find nothing in so short a text.
            most = 2 if name == "Medusa" else 3
            assert len(lossless[0]["acceptance_by_depth"] or most * [0]) == most


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--drafters=a=ngram,a=ngram", "drafters: expected NAME=PATH, each name once, found 'a=n"),
        ("--trees=Falcon=tree.json", "trees: expected a name of --drafters, found 'Falcon'"),
        ("--trees=Medusa=nowhere", "nowhere: expected a tree that plan.py wrote"),
        ("--verifiers=Medusa=odd", "verifier: expected block, "),
        ("--verifiers=Medusa=kseq", "verifiers: Medusa: verifier: expected "),
        ("--drafters=a=none", "drafters: expected drafters, found none, which drafts nothing"),
        ("--drafters=a=nowhere", "nowhere"),
        ("--config.dynamic=((4,2),)", "dynamic: expected (nodes, levels, width), found (4, 2)"),
        ("--config.dynamic=(4,2,2)", "dynamic: expected (nodes, levels, width), found 4"),
        ("--config.branching=(4,2)", "branching: expected a tuple of tuples, found 4 in it"),
        ("--config.chains=0", "chains: expected an integer >= 1, found 0"),
    ],
)
def test_drafters_refuses_in_one_line(drafters, flag, message):
    _, flags = drafters
    fails_with_one_line(run("compare.py", *flags, flag), message)


def test_speed_by_task_is_drawn(tmp_path):
    plots = pytest.importorskip("spsjax.cli.comparison_plots")
    names = ("n-gram", "chain of 4"), ("n-gram", "chain, K chosen"), ("copy", "chain of 4")
    rows = [
        {"setting": setting, "task": task, "drafter": drafter, "shape": shape, "speedup": 1.5}
        for setting in ("greedy", "nucleus")
        for task in ("stdlib", "edit")
        for drafter, shape in names
    ]
    plots.tasks(rows, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def verifier_flags(pair, folder, num_nodes):
    """Returns a small comparison of rules of verification as flags."""
    more = settings(num_nodes=num_nodes, levels=2, run_settings="('sampled','greedy')")
    return *pair, *RULES, *more, f"--workdir={folder}"


def judged(folder) -> list[dict]:
    """Returns the rows of a table, each of which must have been measured."""
    rows = json.loads((folder / "table.json").read_text(encoding="utf-8"))["rows"]
    assert all(1 <= row["expected"] <= row["levels"] + 1.001 for row in rows)
    assert {row["setting"] for row in rows} == {"sampled", "greedy"}
    assert all(row["ms_per_token"] > 0 and row["tokens"] == 12 for row in rows)
    assert {row["same_tokens"] for row in rows if row["setting"] == "greedy"} == {True}
    return rows


@pytest.mark.process
def test_verifiers_prints_its_table_again(pair, tmp_path):
    flags = verifier_flags(pair, tmp_path, 2)
    first = succeeds("compare.py", VERIFIERS, *flags).stdout
    rules = "rejection", "block", "match", "typical"
    rows = {(row["draft"], row["rule"]) for row in judged(tmp_path)}
    assert rows == {("chain", rule) for rule in rules}
    assert "same texts" in first and "other texts" not in first
    assert (tmp_path / "table.png").stat().st_size > 10_000
    assert succeeds("compare.py", VERIFIERS, *flags, by=launch).stdout == first
    other = run("compare.py", VERIFIERS, *flags, "--config.seed=1")
    fails_with_one_line(other, "expected.jsonl", "seed")


@pytest.mark.slow
def test_verifiers_judges_and_times_trees(pair, tmp_path, monkeypatch):
    """Two kinds of trees with a rule each: `verifier_comparison_test` has all kinds and rules."""
    drafts = verifier_comparison.drafts

    def two_trees(*arguments):
        _, _, *trees, _ = drafts(*arguments)
        return [dataclasses.replace(kind, rules=kind.rules[-1:]) for kind in trees]

    monkeypatch.setattr(verifier_comparison, "drafts", two_trees)
    succeeds("compare.py", VERIFIERS, *verifier_flags(pair, tmp_path, 4))
    rows = {(row["draft"], row["rule"]) for row in judged(tmp_path)}
    assert rows == {("independent tree", "kseq"), ("dynamic tree", "typical")}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.run_settings=hot", "hot"),
        ("--config.levels=0", "levels"),
        ("--config.longest_chain=2", "found 4"),
        ("--config.levels=1", "at most 1 levels and 8 children"),
        ("--config.compare=odd", "compare: expected one of drafters, verifiers, drafts, weights"),
        ("--drafters=a=ngram", "--drafters: expected no value with compare = verifiers"),
    ],
)
def test_verifiers_refuses_in_one_line(pair, tmp_path, flag, message):
    result = run("compare.py", VERIFIERS, *pair, flag, f"--workdir={tmp_path / 'x'}")
    fails_with_one_line(result, message)
    assert not (tmp_path / "x").exists()


TRAINED = {
    "model": {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    "length": 32, "batch": 2, "steps": 4, "eval_every": 4, "eval_examples": 2,
    "optimization": {"warmup": 1},
    "draft_eval": {"prompts": 2, "prompt_length": 8, "new_tokens": 8},
}  # fmt: skip


def drafts(pair, texts, folder, **changes):
    """Returns flags that compare one draft after a start."""
    config = {
        "compare": "drafts",
        "base": "pystdlib_draft",
        "common": TRAINED | {"target": pair[0].partition("=")[2], "data": {"train": (texts,)}},
        "start": {"objective": {"name": "cross_entropy"}},
        "runs": {"forward_kl": {"objective": {"name": "forward_kl"}}},
        "speed": {
            "prompts": 1, "prompt_tokens": 8, "max_new_tokens": 8, "repetitions": 1,
            "num_speculative_tokens": 2, "temperature": 1.0,
        },
    }  # fmt: skip
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    path, function = folder / "config.py", f"return ml_collections.ConfigDict({config!r})"
    path.write_text(f"import ml_collections\ndef get_config():\n    {function}\n")
    return f"--config={path}", f"--workdir={folder / 'runs'}"


@pytest.mark.process
@pytest.mark.training
def test_drafts_writes_table_and_resumes(pair, texts, tmp_path):
    pytest.importorskip("matplotlib")
    flags = drafts(pair, texts, tmp_path)
    first = succeeds("compare.py", *flags)
    rows = json.loads((tmp_path / "runs" / "table.json").read_text())["rows"]
    assert set(rows) == {"forward_kl"}
    for row in rows.values():
        assert 0 < row["acceptance_rate"] < 1 and row["acceptance_rate_interval"] >= 0
        assert row["ms_per_draft_step"] > 0 and row["speedup"] > 0
        assert 1 <= row["block_efficiency_temperature_0"] <= 5
    assert (tmp_path / "runs" / "table.png").read_bytes().startswith(b"\x89PNG")
    known = json.loads((tmp_path / "runs" / "forward_kl" / "config.json").read_text())
    assert known["init"] == str(tmp_path / "runs" / "start" / "model")
    assert first.stdout.startswith("Drafts of ") and "pystdlib_draft: start, " in first.stdout
    config = json.loads((tmp_path / "runs" / "experiment.json").read_text())
    assert config["base"] == "pystdlib_draft" and "seed:" not in first.stdout
    table = (tmp_path / "runs" / "table.md").read_text()
    assert table in first.stdout and table.count("\n") == 3
    columns = "draft | acceptance rate | greedy agreement | tokens per call, T = 0"
    assert columns in table and " ± " in table
    second = succeeds("compare.py", *flags, by=launch)
    assert "step/s" not in second.stderr  # nothing is trained again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": {"b": {"model": {"d_model": -3}}}}, "error: --config.runs.b.model.d_model: exp"),
        ({"common": {"stepz": 3}}, "Did you mean --config.common.steps?"),
        (
            {"common": {"length": -1}},
            "error: --config.common.length: expected an integer >= 1, fou",
        ),
        ({"runs": {"start": {}}}, "runs: expected one or more by name, none of them 'start'"),
        ({"base": "pystdlib_target"}, "found"),
        ({"speed": {"max_new_tokens": 9999}}, "speed.max_new_tokens: expected at most "),
        ({"speed": {"num_speculative_tokens": 9999}}, "less than the context, 256, found 9999"),
    ],
)
def test_drafts_with_a_mistake_trains_nothing(pair, texts, tmp_path, changes, message):
    pytest.importorskip("matplotlib")
    result = run("compare.py", *drafts(pair, texts, tmp_path, **changes), path=tmp_path)
    fails_with_one_line(result, message)
    assert not (tmp_path / "runs").exists()


def test_drafts_checks_its_outputs_first(texts, tmp_path):
    """An output that cannot be written is found before anything is loaded or trained."""
    pytest.importorskip("matplotlib")
    (tmp_path / "runs" / "table.png").mkdir(parents=True)
    result = run("compare.py", *drafts(["--target=nosuch"], texts, tmp_path), path=tmp_path)
    fails_with_one_line(result, "table.png: expected a file or nothing, found a folder")


@pytest.mark.slow
def test_weights_shows_each_kind_beside_the_original(pair, tmp_path):
    flags = settings(prompts=2, prompt_tokens=10, max_new_tokens=6, rows="(1,3)", repetitions=1)
    shown = succeeds("compare.py", WEIGHTS, pair[0], *flags, f"--workdir={tmp_path}").stdout
    assert (tmp_path / "table.md").read_text("utf-8") in shown
    original, *others = json.loads((tmp_path / "table.json").read_text("utf-8"))["rows"]
    assert original["accepted"] is None and set(original["ms"]) == {"1", "3"}
    assert [row["weights"] for row in others] == ["int8", "int8_dynamic"]
    for row in others:
        assert row["bytes"] < original["bytes"] and 0 < row["accepted"] <= 1
        assert row["nats"] == pytest.approx(original["nats"], rel=0.1)
