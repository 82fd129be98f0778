"""Every notebook runs from top to bottom."""

import json
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize(
    "path", sorted((_ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.name
)
def test_runs_from_top_to_bottom(path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    if path.stem == "plan_a_pod":
        pytest.importorskip("libtpu", reason="libtpu, the TPU's compiler, is not installed")
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}[{number}]", "exec"), names)
    assert capsys.readouterr().out
