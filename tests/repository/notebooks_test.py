"""Notebooks: they run from top to bottom, and are stored with small outputs."""

import importlib.util
import json
import re

import pytest
from helpers import notebooks
from helpers.environment import ROOT


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS.values(), ids=notebooks.NOTEBOOKS)
def test_notebook_is_stored_with_small_outputs(path):
    outputs = [cell["outputs"] for cell in notebooks.cells_of(path) if cell["cell_type"] == "code"]
    kinds = {output["output_type"] for cell in outputs for output in cell}
    assert kinds <= {"stream", "display_data", "execute_result"}  # no error
    assert any("image/png" in str(output) for cell in outputs for output in cell)
    assert path.stat().st_size < 200_000
    text = json.dumps(outputs)
    assert not [
        piece for piece in ("Traceback", "Warning", "slow_operation_alarm") if piece in text
    ]
    assert not re.findall(r"""(?:[\s"'(]|\\n)/\w[\w.-]*/\S*""", text)


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS.values(), ids=notebooks.NOTEBOOKS)
def test_first_cell_without_spsjax_names_repository(path, monkeypatch):
    source = next(
        cell["source"] for cell in notebooks.cells_of(path) if cell["cell_type"] == "code"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^spsjax is not .*: set REPOSITORY"):
        exec(compile("".join(source), path.name, "exec"), {})


@pytest.mark.notebook
@pytest.mark.parametrize("name", sorted(notebooks.NOTEBOOKS.keys() - {"plan_a_pod"}))
def test_notebook_runs_from_top_to_bottom(name, capsys, monkeypatch, tmp_path):
    """`aot_test` runs plan_a_pod, because both compile the same programs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    notebooks.run(name, capsys, monkeypatch)
