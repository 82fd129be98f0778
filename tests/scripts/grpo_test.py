"""grpo.py as users run it."""

import json

import pytest
from helpers.command_line import fails_with_one_line, run, settings, succeeds

SMALL = settings(
    prompts="('a = 1\\n',)", samples=2, max_new_tokens=8, rows=2, steps=3, num_speculative_tokens=2
)
DRAFTER = ("--config.drafter.steps=1", "--config.drafter.batch=2")


@pytest.mark.slow
@pytest.mark.process
def test_grpo_writes_what_each_run_gave(pair, tmp_path):
    shown = succeeds("grpo.py", *SMALL, *DRAFTER, *pair, f"--workdir={tmp_path}").stdout
    content = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert [row["arm"] for row in content["arms"]] == ["plain", "frozen", "refreshed"]
    assert len(content["steps"]) == 9 and "| refreshed |" in shown
    plain, frozen, refreshed = content["arms"]
    assert plain["accepted"] == [0, 0] and plain["step_speedup"] == 1
    assert refreshed["draft"] > 1000 * frozen["draft"]  # which does not train
    first = [row["reward"] for row in content["steps"] if row["step"] == 0]
    assert all(0 <= reward <= 1 for reward in first)
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_run_is_one_line(tmp_path):
    result = run("grpo.py", "--config.arms=('warm',)", f"--workdir={tmp_path}")
    fails_with_one_line(result, "arms: expected some of plain, frozen, refreshed, found warm")
