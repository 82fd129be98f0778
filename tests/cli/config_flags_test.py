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
    "data": {"train": ("texts", "more"), "validation": ""},
})  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--config.optimisation.warmup=3", ", such as --config.optimization.warmup"),
        ("-config.warmup", ", such as --config.optimization.warmup"),
        ("--config.temprature=1", ", such as --config.sampling.temperature"),
        ("--config.model.steps=1", ", such as --config.steps or --config.objective.steps"),
        ("--config.beams=1", ""),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_flags(flag, nearest):
    name = f"--{flag.lstrip('-').partition('=')[0]}"
    with one_line(f"{name}: expected a key of the config{nearest}, found no such key"):
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
    whole = name if "mesh" not in name else "--config.mesh"
    fails_with_one_line(run(*command, flag), f"{whole}: {message}")


@pytest.fixture
def names():
    return ConfigDict({"target": "pystdlib/target", "draft": "pystdlib/draft", "drafter": "model"})


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ("pystdlib/target", None, "pystdlib/draft"),
        ("pycode/target", None, "pycode/eagle3"),
        ("runs/mine", None, "suffix"),
        ("runs/mine", "runs/draft", "runs/draft"),
        ("runs/mine", "", ""),
    ],
)
def test_target_without_a_draft_gets_one_that_fits(names, capsys, target, draft, expected):
    configs.choose_pair(names, target, draft)
    assert (names.target, names.draft) == (target or "pystdlib/target", expected)
    chosen = draft is None and expected != "pystdlib/draft"
    told = f"No draft is given: {target} is drafted for by {expected}\n" if chosen else ""
    assert capsys.readouterr().err == told


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
