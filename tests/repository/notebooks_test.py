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


def test_address_is_written_once_into_every_notebook(tmp_path, monkeypatch):
    """A second address replaces the first one, and nothing else changes."""
    spec = importlib.util.spec_from_file_location("address", ROOT / "notebooks" / "address.py")
    address = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(address)
    monkeypatch.setattr(address, "FOLDER", tmp_path)
    for path in notebooks.NOTEBOOKS.values():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert address.main(["https://github.com/a/b"]) == ""
    assert address.main(["https://github.com/owner/name"]) == ""
    for path in notebooks.NOTEBOOKS.values():
        written = (tmp_path / path.name).read_text("utf-8")
        badge = f".com/github/owner/name/blob/main/notebooks/{path.name})"
        assert written.count(badge) == 1 and "a/b" not in written
        assert written.count('REPOSITORY = \\"https://github.com/owner/name\\"') == 1
        lines = written.replace("https://github.com/owner/name", "").splitlines()
        lines = [line for line in lines if "colab-badge" not in line]
        assert lines == path.read_text("utf-8").splitlines()
    assert address.main(["owner/name"]).startswith("error: expected an address such as")
