"""Flags of a config: unknown keys, whole names in errors, and which drafter a target gets."""

import pytest
from helpers.bad_input import one_line
from helpers.command_line import ROOT, fails_with_one_line, run
from ml_collections import ConfigDict

from spsjax.cli import config_flags, configs

TARGET = ROOT / "configs" / "experiments" / "pystdlib_target.py"
CONFIG = ConfigDict({
    "steps": 300, "target": "pystdlib/target", "objective": {"steps": 7},
    "optimization": {"warmup": 20, "learning_rate": 1e-3}, "sampling": {"temperature": 1.0},
    "data": {"train": ("texts", "more"), "validation": ""}, "seed": 5, "fit": {"seed": 5},
})  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--config.optimisation.warmup=3", "--config.optimization.warmup"),
        ("-config.warmup", "--config.optimization.warmup"),
        ("--config.temprature=1", "--config.sampling.temperature"),
        ("--config.model.steps=1", "--config.steps or --config.objective.steps"),
        ("--config.beams=1", ""),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_flags(flag, nearest):
    name = f"--{flag.lstrip('-').partition('=')[0]}"
    hint = f". Did you mean {nearest}?" if nearest else ""
    with one_line(f"{name}: expected a key of the config, found no such key{hint}"):
        config_flags.check(["script", "--other=1", flag], CONFIG)


def test_known_keys_are_taken():
    flags = "--config.steps=1", "--config.data.train[0]=x", "--config=file.py", "--configs.x=1"
    flags += ("--prompt", "-config. is what a text begins with", "--config. =1")
    config_flags.check(flags, CONFIG)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("optimization.warmup: expected 1, found 2", "--config.optimization.warmup: expected 1, "),
        ("steps: expected an integer >= 9, found 7", "--config.objective.steps: expected an inte"),
        ("steps: expected an integer, found 3000", "--config.objective.steps or --config.steps: "),
        ("prompts[1], warmup: expected both", "prompts[1], --config.optimization.warmup: expected"),
        ("warmup, rows, learning_rate: expected less", "--config.optimization.warmup, rows, --co"),
        ("steps: expected an integer, found 300", "--config.steps: expected an integer, found 300"),
        ("rows: 7: no tree", "rows: 7: no tree"),
        ("n-gram: warmup: expected 1, found 2", "n-gram: --config.optimization.warmup: expected"),
        ("train: expected others, found 'more'", "--config.data.train: expected others, found"),
        ("learning_rate: FILE: no rate", "--config.optimization.learning_rate: FILE: no rate"),
        ("seed: expected 3, found 5", "--config.seed: expected 3, found 5"),
        ("more: expected a file, found none", "--config.data.train: more: expected a file, found"),
        ("mine: expected a model", "--draft: mine: expected a model"),
        ("rows: expected 3, found 4", "rows: expected 3, found 4"),
        ("expected one process, found 2", "expected one process, found 2"),
    ],
)
def test_error_names_the_whole_flag(message, expected):
    assert config_flags.whole(message, CONFIG, {"--draft": "mine"}).startswith(expected)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.optimization.warmup=-3", "expected an integer >= 0, found -3"),
        ("--config.model.num_layers=0", "expected at least 1, found 0"),
        ("--config.data.train=x", "x: expected a file, a folder with files"),
        ("--config.sampling.temperature=-1.0", "expected"),
        ("--config.max_new_tokens=-1", "expected integers >= 0, found -1"),
        ("--config.mesh.data=0", "expected"),
    ],
)
def test_scripts_name_the_whole_flag(pair, tmp_path, flag, message):
    """Of any depth of a config, whatever module has checked the value."""
    name, _, _ = flag.partition("=")
    command = ["train.py", f"--config={TARGET}", f"--workdir={tmp_path / 'run'}"]
    if name.partition(".")[2].partition(".")[0] in ("sampling", "max_new_tokens", "mesh"):
        command = ["generate.py", *pair, "--prompt=x"]
    fails_with_one_line(run(*command, flag), f"{name}: {message}")


@pytest.fixture
def names():
    return ConfigDict({"target": "pystdlib/target", "draft": "pystdlib/draft", "drafter": "model"})


@pytest.mark.parametrize(
    ("target", "draft", "expected", "why"),
    [
        ("pystdlib/target", None, "pystdlib/draft", ""),  # the config's own
        ("pycode/target", None, "pycode/eagle3", "which is shipped for pycode/target"),
        (
            "runs/mine",
            None,
            "suffix",
            "which needs no weights, as no drafter is shipped for runs/m",
        ),
        ("runs/mine", "runs/draft", "runs/draft", ""),
        ("runs/mine", "", "", ""),
    ],
)
def test_target_without_a_draft_gets_one_that_fits(names, capsys, target, draft, expected, why):
    configs.choose_pair(names, target, draft)
    assert (names.target, names.draft) == (target or "pystdlib/target", expected)
    told = capsys.readouterr().err
    assert told.startswith(f"No draft is named: {expected} drafts, {why}") if why else not told
    assert told.count("\n") == bool(why)


def test_draft_that_fits_any_target_is_kept(names, capsys):
    for draft in ("", "ngram"):
        names.draft = draft
        configs.choose_pair(names, "pycode/target")
        assert names.draft == draft
    names.update({"target": "pystdlib/target", "draft": "early_exit:skips.json"})
    configs.choose_pair(names, "pycode/target")
    assert names.draft == "pycode/eagle3"


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (
            "generate.py",
            ["--config.target=T", "--prompt=x"],
            "suffix drafts, which needs no weights",
        ),
        ("generate.py", ["--target=T", "--prompt=x"], "suffix drafts, which needs no weights"),
        ("serve.py", ["--target=T"], "suffix drafts, which needs no weights"),
        (
            "reproduce.py",
            ["--target=T", "--experiment=table1"],
            "suffix drafts, which needs no weig",
        ),
        ("quickstart.py", ["--target=T"], "suffix drafts, which needs no weights"),
        ("benchmark.py", ["--target=T"], "suffix drafts, which needs no weights"),
        ("benchmark.py", ["--target=gpt2:xl", "--random"], "a draft model for gpt2:xl, found none"),
        ("benchmark.py", ["--config=load", "--target=T"], "suffix drafts, which needs no weights"),
        ("benchmark.py", ["--config=shapes", "--config.flips.target=T"], "a draft model for T"),
        ("benchmark.py", ["--config=shapes", "--config.pairs.gpt2_xl.target=T"], "model for T"),
        ("compare.py", ["--config=compare_verifiers", "--target=T"], "a draft model for T"),
        (
            "plan.py",
            ["--config=plan_tree", "--target=T"],
            "a drafter with weights for T, found none",
        ),
        ("plan.py", ["--config=plan_context", "--target=T"], "a draft model for T, found none"),
        ("train.py", ["--config=stop_rule", "--config.target=T"], "a drafter with weights for T"),
        (
            "compile.py",
            ["--config.target=llama:2-70b"],
            "a draft model for llama:2-70b, found n",
        ),
    ],
)
def test_no_script_drafts_by_the_draft_of_another_target(tmp_path, script, flags, message):
    """With a target alone; `T` is none, so that no script loads a model."""
    experiments = ROOT / "configs" / "experiments"
    flags = [
        f"--config={experiments / value}.py" if name == "--config" else flag
        for flag in flags
        for name, _, value in [flag.partition("=")]
    ]
    if script in ("benchmark.py", "compare.py", "plan.py", "reproduce.py", "train.py"):
        flags.append(f"--workdir={tmp_path / 'run'}")
    result = run(script, *flags, path=tmp_path)
    assert result.returncode and message in result.stderr.splitlines()[0], result.stderr
    assert not (tmp_path / "run").exists()


def test_folders_beside_a_target_that_is_missing_are_not_shipped(names, tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").touch()
    configs.choose_pair(names, str(tmp_path / "target"), None)
    assert names.draft == "suffix"


def test_target_without_a_draft_model_is_refused_where_one_is_needed(names):
    with one_line("draft: expected a draft model for pycode/target"):
        configs.choose_pair(names, "pycode/target", None, models=True)
    with one_line("draft: expected a drafter with weights for runs/mine"):
        configs.choose_pair(names, "runs/mine", None, weights=True)
    configs.choose_pair(names, "pycode/target", None, weights=True)
    assert names.draft == "pycode/eagle3"
    names.update({"draft": "pystdlib/draft", "drafter": "ngram"})  # which needs none
    configs.choose_pair(names, "runs/mine", None)
    assert names.draft == "pystdlib/draft"
