"""Notebooks: they run from top to bottom, and are stored with small outputs."""

import importlib.util
import json
import pathlib
import re

import pytest

_FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = {path.stem: path for path in sorted(_FOLDER.glob("*.ipynb"))}

# Replacements that make a notebook fast enough for a test.
SMALLER = {
    "distill_a_draft": {
        '{"steps": 300}': '{"steps": 6, "eval_every": 6, "optimization": {"warmup": 2}}',
        "max_new_tokens=64": "max_new_tokens=8",
    },
    "plan_a_pod": {  # as in aot_test
        "vocab_size=128_256": "vocab_size=4000",
        "d_model=4096": "d_model=1024",
        "d_ff=14_336": "d_ff=3584",
        "num_layers=32": "num_layers=2",
        "num_heads=32": "num_heads=8",
    },
    "train_eagle3": {
        '"steps": 150, "eval_every": 50, "length": 128, "batch": 8, "eval_examples": 32': (
            '"steps": 4, "eval_every": 4, "length": 32, "batch": 8, "eval_examples": 8, '
            '"data": {"train": runpy.run_path(str(CONFIGS.parent / "experiments/tiny_target.py"))'
            '["get_config"]().data.train}, '
            '"optimization": {"warmup": 2}'
        ),
        "DEPTH = 5": "DEPTH = 2",
        "num_nodes=16, depth=DEPTH, width=4": "4, 2, 2",
        '"prompts": 8': '"prompts": 1, "prompt_length": 8, "new_tokens": 8',
        "None, params, 64": "None, params, 8",
    },
    "quickstart": {
        "KS = (1, 2, 4, 8)": "KS = (4,)",
        "repetitions=3": "repetitions=1",
        '"max_new_tokens": 96': '"max_new_tokens": 24',
    },
}


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_notebook_is_stored_with_small_outputs(path):
    """Stored outputs have a plot, no error, no message of a library and no path of a machine."""
    outputs = [cell["outputs"] for cell in _cells(path) if cell["cell_type"] == "code"]
    kinds = {output["output_type"] for cell in outputs for output in cell}
    assert kinds <= {"stream", "display_data", "execute_result"}  # no error
    assert any("image/png" in str(output) for cell in outputs for output in cell)
    assert path.stat().st_size < 200_000
    text = json.dumps(outputs)
    assert not [
        piece for piece in ("Traceback", "Warning", "slow_operation_alarm") if piece in text
    ]
    assert not re.findall(r"""(?:[\s"'(]|\\n)/\w[\w.-]*/\S*""", text)


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_first_cell_without_spsjax_names_repository(path, monkeypatch):
    """Where spsjax is not installed and no address is filled in, one line says what to set."""
    source = next(cell["source"] for cell in _cells(path) if cell["cell_type"] == "code")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^spsjax is not .*: set REPOSITORY"):
        exec(compile("".join(source), path.name, "exec"), {})


@pytest.mark.parametrize("name", sorted(NOTEBOOKS.keys() - {"plan_a_pod"}))  # see aot_test.py
def test_notebook_runs_from_top_to_bottom(name, capsys, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(_FOLDER.parent / "configs")
    monkeypatch.chdir(tmp_path)
    run(name, capsys, monkeypatch)


def run(name, capsys, monkeypatch):
    """Runs a notebook's cells, which must print something."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = _cells(NOTEBOOKS[name])
    for before, after in SMALLER.get(name, {}).items():
        (cell,) = (cell for cell in cells if before in "".join(cell["source"]))
        cell["source"] = "".join(cell["source"]).replace(before, after)
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}[{number}]", "exec"), names)
    assert capsys.readouterr().out


def _cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]
