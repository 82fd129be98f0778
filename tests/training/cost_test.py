"""The cost of training tokens: times in turn, and the table of a run."""

import json

import pytest
from helpers.command_line import ROOT, launch, succeeds
from ml_collections import ConfigDict

from spsjax import InputError
from spsjax.cli import configs
from spsjax.cli.measurements import training
from spsjax.training import cost

CONFIG = ROOT / "configs" / "experiments" / "training_cost.py"
DRAFTERS = ROOT / "configs" / "drafters"


class Training:
    """Training whose turns take the given seconds per step."""

    tokens, parameters, operations, compile_seconds = 10, 1, 2.0, 3.0

    def __init__(self, *seconds):
        self._seconds = iter(seconds)

    def time(self, steps):
        return next(self._seconds)


def test_ratio_is_that_of_a_turn_and_the_first_turn_does_not_count():
    trainings = {"first": Training(9.0, 1.0, 2.0, 4.0), "other": Training(90.0, 2.0, 5.0, 8.0)}
    first, other = cost.time_in_turns(trainings, 3, 1)
    assert (first["ratio"], first["ratio_range"]) == (1, [1, 1])
    assert (other["ratio"], other["ratio_range"]) == (2, [2, 2.5])
    assert (first["us_per_token"], other["us_per_token"]) == (2e5, 5e5)


@pytest.mark.parametrize("name", ["dflahs", 3])
def test_unknown_drafter_is_one_line(name):
    with pytest.raises(InputError, match=r"^drafters: expected some of .*eagle3.*, found "):
        training.config_of(name, configs.of_file(str(CONFIG)), DRAFTERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"changes": {"batch": 2.5}}, "^changes: expected values of the types in medusa.py, found"),
        ({"changes": {"target_cache": 3}}, "^changes: expected values of the types"),
        ({"changes": {"target": "x"}}, "^changes.target: expected none"),
        ({"drafters": ("medusa", "medusa")}, "^drafters: expected different ones, found medusa"),
        ({"drafters": ()}, "^drafters: expected at least one"),
    ],
)
def test_mistake_is_one_line(tmp_path, change, message):
    config = configs.of_file(str(CONFIG)).to_dict() | {"drafters": ("medusa",)} | change
    with pytest.raises(InputError, match=message) as caught:
        training.run(ConfigDict(config), tmp_path / "cost", DRAFTERS)
    assert "\n" not in str(caught.value) and not (tmp_path / "cost").exists()


@pytest.mark.slow
def test_trainings_are_timed_one_per_row_of_the_table(tmp_path):
    changes = ["--config.changes.length=64", "--config.repetitions=1", "--config.steps=1"]
    drafters = "--config.drafters=('mlp_speculator','medusa')"
    flags = [f"--config={CONFIG}", f"--workdir={tmp_path}", drafters, *changes]
    output = succeeds("benchmark.py", *flags, by=launch).stdout
    rows = json.loads((tmp_path / "table.json").read_text("utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["mlp_speculator", "medusa"]
    assert all(row["us_per_token"] > 0 and row["operations_per_token"] > 0 for row in rows)
    assert "| medusa |" in output and not list(tmp_path.rglob("checkpoints"))
