"""The shipped notebooks, made small enough to run in a test."""

import json

import pytest
from helpers.environment import ROOT

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}

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
        "jax.device_count() > 1": "jax.device_count() > 8",  # distill_a_draft has the mesh
        '"steps": 150, "eval_every": 50, "length": 128, "batch": 8, "eval_examples": 32': (
            '"steps": 4, "eval_every": 4, "length": 32, "batch": 8, "eval_examples": 8, '
            '"data": {"train": runpy.run_path(str(CONFIGS.parent / "experiments/tiny_target.py"))'
            '["get_config"]().data.train}, '
            '"optimization": {"warmup": 2}'
        ),
        "DEPTH = 5": "DEPTH = 2",
        "num_nodes=16, depth=DEPTH, width=4": "4, 2, 2",
        '"prompts": 8': '"prompts": 8, "temperatures": ()',
        "None, params, 64": "None, params, 8",
    },
    "verify_exactness": {"= 3, 3, 2048, 256": "= 3, 2, 512, 128"},
    "quickstart": {
        'loading.fetch("smollm2")': 'raise spsjax.InputError("no download in a test")',
        "MAX_NEW_TOKENS = 96": "MAX_NEW_TOKENS = 16",
        "KS = (1, 2, 4, 8)": "KS = (4,)",
    },
}


def run(name, capsys, monkeypatch):
    """Runs a notebook's cells, which must print something."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = cells_of(NOTEBOOKS[name])
    for before, after in SMALLER.get(name, {}).items():
        (cell,) = (cell for cell in cells if before in "".join(cell["source"]))
        cell["source"] = "".join(cell["source"]).replace(before, after)
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}[{number}]", "exec"), names)
    assert capsys.readouterr().out


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]
