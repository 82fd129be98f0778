"""Every notebook runs from top to bottom, and is stored with what it showed."""

import json
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parent.parent


# plan_a_pod compiles what ahead_test.py does.
notebooks = pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.name,
            marks=pytest.mark.xdist_group("ahead") if path.stem == "plan_a_pod" else (),
        )
        for path in sorted((_ROOT / "notebooks").glob("*.ipynb"))
    ],
)


@notebooks
def test_is_stored_with_small_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kinds = {output["output_type"] for cell in outputs for output in cell}
    assert kinds <= {"stream", "display_data", "execute_result"}  # no error
    pictures = [output for cell in outputs for output in cell if "image/png" in str(output)]
    assert pictures
    assert path.stat().st_size < 200_000
    assert not {"/home/", "/tmp/", "/root/", "Traceback"} & set(json.dumps(outputs).split())


@notebooks
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
