"""plan_tree.py and compare_verifiers.py as users run them."""

import dataclasses
import json

import jax
import pytest
from helpers.command_line import fails_with_one_line, launch, run, succeeds, tiny_pair

import spsjax
from spsjax import loading
from spsjax.drafters import medusa
from spsjax.evaluation import verifier_comparison

SMALL = (
    "--config.prompts=2",
    "--config.prompt_tokens=10",
    "--config.max_new_tokens=6",
    "--config.most_children=2",
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    """Flags that name a tiny target and a draft, each with a tokenizer."""
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def planned(pair, tmp_path_factory):
    """The output of plan_tree.py, and the file that it wrote."""
    path = tmp_path_factory.mktemp("tree") / "tree.json"
    flags = (*pair, *SMALL, "--config.num_nodes=1,3", "--config.repetitions=1")
    return succeeds("plan_tree.py", *flags, f"--output={path}").stdout, path


def tree_file(path, *parents):
    path.write_text(json.dumps({"parents": parents, "replacement": False}), encoding="utf-8")
    return f"--config.tree={path}"


@pytest.mark.process
def test_plan_tree_shows_rates_and_writes_the_fastest_tree(planned):
    output, path = planned
    for text in ("95% interval", "tokens per call", "chain", "tree of 3", str(path)):
        assert text in output
    tree = json.loads(path.read_text(encoding="utf-8"))
    assert tree["parents"][0] == 0 and len(tree["rates"]) == 2 and tree["speedup"] > 0


@pytest.mark.slow
def test_plan_tree_of_a_head_chooses_tokens_by_depth_and_rank(pair, tmp_path):
    """The tree that it writes is decoded with, and leaves greedy texts as they are."""
    folder = next(flag for flag in pair if flag.startswith("--target")).partition("=")[2]
    target = spsjax.load(folder)
    drafter = medusa.Drafter(target.config, num_heads=2)
    weights = drafter.init_params(jax.random.key(0))
    weights = drafter.from_target(weights, {"target": target.params, "drafter": {}})
    spsjax.save_drafter(tmp_path / "head", loading.LoadedDrafter("", drafter, weights), target)
    flags = (f"--target={folder}", f"--draft={tmp_path / 'head'}", *SMALL)
    sizes = "--config.num_nodes=1,4", "--config.repetitions=1"
    output = succeeds("plan_tree.py", *flags, *sizes, f"--output={tmp_path / 'tree.json'}").stdout
    for text in ("level 1, rank", "level 2, rank", "tree of 4", "speed-up"):
        assert text in output
    tree = json.loads((tmp_path / "tree.json").read_text(encoding="utf-8"))
    assert tree["chosen"] and len(tree["rates"]) == 2
    flags = (*flags[:2], "--prompt=def f(x):", "--json", "--config.sampling.temperature=0")
    flags += ("--config.max_new_tokens=8", "--config.stop_at_eos=false")
    with_tree = succeeds("generate.py", *flags, f"--config.tree={tmp_path / 'tree.json'}")
    plain = succeeds("generate.py", *flags, "--config.drafter=none")
    assert json.loads(with_tree.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]


def test_predict_shows_when_a_tree_pays():
    """By hand: (1 + 0.6 + 0.3) tokens for a draft step of 0.5 and a pass of 10 and 2 more rows."""
    flags = "--children=0.6,0.3", "--draft_ms=0.5", "--target_ms=10", "--num_nodes=2"
    shown = succeeds("predict.py", *flags, "--row_ms=0.5").stdout
    assert "best: tree of 2" in shown and f"{1.9 * 10 / 11.5:.2f}" in shown
    assert "best: chain" in succeeds("predict.py", *flags, "--row_ms=20").stdout
    for flag, part in (
        ("--acceptance=0.5", "--acceptance: expected none beside --children"),
        ("--max_k=3", "--max_k: expected none beside --children, found 3"),
        ("--children=2", "rates: expected probabilities"),
        ("--children=x", "--children: expected numbers"),
        ("--row_ms=nan", "--row_ms: expected milliseconds"),
    ):
        fails_with_one_line(run("predict.py", *flags, flag), part)
    chain = "--acceptance=0.5", *flags[1:]
    fails_with_one_line(run("predict.py", *chain), "--num_nodes: expected it only with --children")


@pytest.mark.process
def test_generate_takes_a_tree_and_a_verifier(pair, planned, tmp_path):
    flags = (*pair, "--prompt=def f(x):", "--json", "--config.sampling.temperature=0")
    flags += ("--config.max_new_tokens=8", "--config.stop_at_eos=false")
    plain = json.loads(succeeds("generate.py", *flags, "--config.drafter=none").stdout)
    fork = tree_file(tmp_path / "fork.json", 0, 0, 1)
    for extra in ((f"--config.tree={planned[1]}",), (fork, "--config.verifier=traversal")):
        result = json.loads(succeeds("generate.py", *flags, *extra).stdout)
        assert result["tokens"] == plain["tokens"]
    assert len(result["stats"]["accepted_histogram"]) == 3
    fails_with_one_line(run("generate.py", *flags, fork, "--config.verifier=block"), "verifier")
    both = "--config.lenience=0.5", "--config.verifier=block"
    fails_with_one_line(run("generate.py", *flags, *both), "lenience: expected 1", "0.5")
    fails_with_one_line(run("generate.py", *flags, fork, "--config.drafter=ngram"), "tree")


@pytest.mark.slow
def test_benchmark_measures_a_tree_beside_the_chains(pair, tmp_path):
    flags = (*pair, "--config.prompts=1", "--config.prompt_tokens=10", "--config.max_new_tokens=6")
    flags += ("--config.repetitions=1", "--config.num_speculative_tokens=2")
    flags += ("--config.ngram.num_speculative_tokens=0", "--config.time_rounds=false")
    fork = tree_file(tmp_path / "fork.json", 0, 0, 1)
    assert "tree of 3" in succeeds("benchmark.py", *flags, fork).stdout
    fails_with_one_line(run("benchmark.py", *flags, fork, "--config.verifier=block"), "tree")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "found Expecting value"),
        ("[]", "plan_tree.py"),
        ('{"parents": [0]}', "replacement"),
        ('{"parents": [1], "replacement": false}', "parents: expected"),
        ('{"parents": 3, "replacement": false}', "parents: expected"),
        ('{"parents": [0], "replacement": 1}', "replacement: expected True or False"),
    ],
)
def test_file_that_holds_no_tree_is_refused(pair, tmp_path, text, part):
    (tmp_path / "tree.json").write_text(text, encoding="utf-8")
    flags = (*pair, "--prompt=x", f"--config.tree={tmp_path / 'tree.json'}")
    fails_with_one_line(run("generate.py", *flags), part)


def verifier_flags(pair, folder, num_nodes):
    """Returns a small comparison of rules of verification as flags."""
    more = f"--config.num_nodes={num_nodes}", "--config.levels=2", f"--workdir={folder}"
    return *pair, *SMALL, "--config.run_settings=('sampled','greedy')", *more


def judged(folder) -> list[dict]:
    """Returns the rows of a table, each of which must have been measured."""
    rows = json.loads((folder / "table.json").read_text(encoding="utf-8"))["rows"]
    assert all(1 <= row["expected"] <= row["levels"] + 1.001 for row in rows)
    assert {row["setting"] for row in rows} == {"sampled", "greedy"}
    assert all(row["ms_per_token"] > 0 and row["tokens"] == 12 for row in rows)
    assert {row["same_tokens"] for row in rows if row["setting"] == "greedy"} == {True}
    return rows


@pytest.mark.process
def test_compare_verifiers_prints_its_table_again(pair, tmp_path):
    """The same command prints the same table, from what another process has stored."""
    flags = verifier_flags(pair, tmp_path, 2)
    first = succeeds("compare_verifiers.py", *flags).stdout
    rules = "rejection", "block", "match", "typical"
    assert {(row["draft"], row["rule"]) for row in judged(tmp_path)} == {
        ("chain", rule) for rule in rules
    }
    assert "same texts" in first and "other texts" not in first
    assert (tmp_path / "table.png").stat().st_size > 10_000
    assert succeeds("compare_verifiers.py", *flags, by=launch).stdout == first
    other = run("compare_verifiers.py", *flags, "--config.seed=1")
    fails_with_one_line(other, "expected.jsonl", "seed")


@pytest.mark.slow
def test_compare_verifiers_judges_and_times_trees(pair, tmp_path, monkeypatch):
    """Two kinds of trees with a rule each: `verifier_comparison_test` has all kinds and rules."""
    drafts = verifier_comparison.drafts

    def two_trees(*arguments):
        _, _, *trees, _ = drafts(*arguments)
        return [dataclasses.replace(kind, rules=kind.rules[-1:]) for kind in trees]

    monkeypatch.setattr(verifier_comparison, "drafts", two_trees)
    succeeds("compare_verifiers.py", *verifier_flags(pair, tmp_path, 4))
    assert {(row["draft"], row["rule"]) for row in judged(tmp_path)} == {
        ("independent tree", "kseq"),
        ("dynamic tree", "typical"),
    }


@pytest.mark.parametrize(
    ("script", "flag", "part"),
    [
        ("plan_tree.py", "--config.num_nodes=0", "num_nodes: expected an integer >= 1"),
        ("plan_tree.py", "--config.num_nodes=()", "num_nodes: expected at least one"),
        ("plan_tree.py", "--config.most_levels=0", "most_levels"),
        ("plan_tree.py", "--config.prompt_tokens=-3", "prompt_tokens"),
        ("plan_tree.py", "--config.sampling.top_p=2.0", "top_p"),
        ("compare_verifiers.py", "--config.most_children=1", "most_children"),
        ("compare_verifiers.py", "--config.run_settings=hot", "hot"),
        ("compare_verifiers.py", "--config.levels=0", "levels"),
        ("compare_verifiers.py", "--config.prompt_tokens=0", "prompt_tokens"),
        ("compare_verifiers.py", "--config.run_settings=()", "run_settings: expected at least one"),
        ("compare_verifiers.py", "--config.longest_chain=2", "found 4"),
        ("compare_verifiers.py", "--config.levels=1", "at most 1 levels and 8 children"),
    ],
)
def test_values_that_cannot_be_used_are_refused(pair, tmp_path, script, flag, part):
    place = f"--{'output' if script == 'plan_tree.py' else 'workdir'}={tmp_path / 'x'}"
    fails_with_one_line(run(script, *pair, flag, place), part)
    assert not (tmp_path / "x").exists()


def test_speed_by_task_is_drawn(tmp_path):
    """One drafter has a chain whose K is chosen, and the other has none."""
    plots = pytest.importorskip("spsjax.cli.plots")
    names = ("n-gram", "chain of 4"), ("n-gram", "chain, K chosen"), ("copy", "chain of 4")
    rows = [
        {"setting": setting, "task": task, "drafter": drafter, "shape": shape, "speedup": 1.5}
        for setting in ("greedy", "nucleus")
        for task in ("stdlib", "edit")
        for drafter, shape in names
    ]
    plots.tasks(rows, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
