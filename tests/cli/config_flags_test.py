"""Flags of a config: unknown keys, whole names in errors, and which drafter a target gets."""

import pytest
from helpers.bad_input import one_line
from helpers.command_line import fails_with_one_line, run, tiny_pair
from ml_collections import ConfigDict

from spsjax import InputError
from spsjax.cli import config_flags, configs

CONFIG = ConfigDict(
    {
        "steps": 300,
        "target": "pystdlib/target",
        "optimization": {"warmup": 20, "learning_rate": 1e-3},
        "objective": {"steps": 7},
        "data": {"train": ("texts", "more"), "validation": ""},
        "sampling": {"temperature": 1.0},
    }
)


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--config.optimisation.warmup=3", ", such as --config.optimization.warmup"),
        ("--config.optimization.warmp=3", ", such as --config.optimization.warmup"),
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
        ("warmup: expected an integer >= 0, found 20", "--config.optimization.warmup: expected an"),
        ("optimization.warmup: expected 1, found 2", "--config.optimization.warmup: expected 1, "),
        ("steps: expected an integer >= 9, found 7", "--config.objective.steps: expected an inte"),
        ("steps: expected an integer, found 3000", "--config.objective.steps or --config.steps: "),
        ("prompts[1], warmup: expected both", "prompts[1], --config.optimization.warmup: expected"),
        ("warmup, rows, learning_rate: expected less", "--config.optimization.warmup, rows, --co"),
        ("steps: expected an integer, found 300", "--config.steps: expected an integer, found 300"),
        ("steps: expected others", "--config.objective.steps or --config.steps: expected others"),
        ("more: expected a file, found none", "--config.data.train: more: expected a file, found"),
        ("'more': expected a file", "--config.data.train: 'more': expected a file"),
        ("mine: expected a model", "--draft: mine: expected a model"),
        ("rows: expected 3, found 4", "rows: expected 3, found 4"),
        ("expected one process, found 2", "expected one process, found 2"),
    ],
)
def test_error_names_the_whole_flag(message, expected):
    assert config_flags.whole(message, CONFIG, {"--draft": "mine"}).startswith(expected)


@pytest.mark.parametrize(
    ("script", "flag", "message"),
    [
        (
            "train_target.py",
            "--config.optimization.warmup=-3",
            "expected an integer >= 0, found -3",
        ),
        (
            "train_target.py",
            "--config.optimization.learning_rate=-1",
            "expected a finite number ab",
        ),
        ("train_target.py", "--config.model.num_layers=0", "expected at least 1, found 0"),
        ("train_target.py", "--config.data.train=x", "x: expected a file, a folder with files"),
        ("generate.py", "--config.sampling.temperature=-1.0", "expected"),
        ("generate.py", "--config.sampling.top_k=-1", "expected"),
        ("generate.py", "--config.max_new_tokens=-1", "expected integers >= 0, found -1"),
        ("generate.py", "--config.mesh.data=0", "expected"),
    ],
)
def test_scripts_name_the_whole_flag(tmp_path_factory, tmp_path, script, flag, message):
    """Of any depth of a config, whatever module has checked the value."""
    name, _, _ = flag.partition("=")
    if script == "generate.py":
        own = [*tiny_pair(tmp_path_factory.mktemp("pair")), "--prompt=x"]
    else:
        own = [f"--workdir={tmp_path / 'run'}"]
    whole = name if "mesh" not in name else "--config.mesh"
    fails_with_one_line(run(script, *own, flag), f"{whole}: {message}")


@pytest.fixture
def pair():
    return ConfigDict({"target": "pystdlib/target", "draft": "pystdlib/draft", "drafter": "model"})


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (None, None, "pystdlib/draft"),
        ("pystdlib/target", None, "pystdlib/draft"),
        ("pycode/target", None, "pycode/eagle3"),
        ("runs/target", None, "suffix"),
        ("runs/mine", None, "suffix"),
        ("runs/mine", "runs/draft", "runs/draft"),
        ("runs/mine", "", ""),
    ],
)
def test_target_without_a_draft_gets_one_that_fits(pair, capsys, target, draft, expected):
    configs.choose_pair(pair, target, draft)
    assert (pair.target, pair.draft) == (target or "pystdlib/target", expected)
    chosen = draft is None and expected != "pystdlib/draft"
    told = f"No draft is given: {target} is drafted for by {expected}\n" if chosen else ""
    assert capsys.readouterr().err == told


def test_folders_beside_a_target_that_is_missing_are_not_shipped(pair, tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").touch()
    configs.choose_pair(pair, str(tmp_path / "target"), None)
    assert pair.draft == "suffix"


def test_target_without_a_draft_model_is_refused_where_one_is_needed(pair):
    with pytest.raises(InputError, match=r"^draft: expected a draft model for pycode/target"):
        configs.choose_pair(pair, "pycode/target", None, models=True)
    with pytest.raises(InputError, match=r"^draft: expected a drafter with weights for runs/mine"):
        configs.choose_pair(pair, "runs/mine", None, weights=True)
    configs.choose_pair(pair, "pycode/target", None, weights=True)
    assert pair.draft == "pycode/eagle3"
    pair.update({"draft": "pystdlib/draft", "drafter": "ngram"})  # which needs none
    configs.choose_pair(pair, "runs/mine", None)
    assert pair.draft == "pystdlib/draft"
