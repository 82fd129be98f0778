"""Helpers that run the scripts as users do, on a tiny pair of models."""

import os
import pathlib
import subprocess
import sys

import jax
from conftest import CHILD_FLAGS

from spsjax import tokenization
from spsjax.data import documents
from spsjax.models import transformer
from spsjax.models.hf import weights as hf_weights

ROOT = pathlib.Path(__file__).parent.parent


def tiny_pair(folder: pathlib.Path) -> list[str]:
    """Makes a target and a draft with a tokenizer in a folder, and returns flags that name them."""
    texts = [text for name, text in documents.stdlib().items() if documents.is_held_out(name)]
    tokenizer = tokenization.train(texts[:3], folder / "tokenizer.model", 400)
    for seed, name in enumerate(("target", "draft")):
        config = transformer.Config(
            vocab_size=400, d_model=16, d_ff=16, num_layers=1, num_heads=2, num_kv_heads=1,
            head_dim=8, max_positions=256, bos_id=tokenizer.bos_id, eos_ids=(tokenizer.eos_id,),
        )  # fmt: skip
        hf_weights.save(folder / name, config, transformer.init(config, jax.random.key(seed)))
        (folder / name / "tokenizer.model").write_bytes(tokenizer.path.read_bytes())
    return [f"--target={folder / 'target'}", f"--draft={folder / 'draft'}"]


def run(script: str, *flags: str, path: pathlib.Path = ROOT) -> subprocess.CompletedProcess:
    """Runs a script in a folder."""
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "COLUMNS": "120"}
    if not script.startswith("compile_"):  # those load the TPU compiler
        environment["XLA_FLAGS"] = CHILD_FLAGS
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *flags],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        cwd=path,
        timeout=600,
    )


def succeeds(script: str, *flags: str) -> subprocess.CompletedProcess:
    """Runs a script, and asserts that it succeeds."""
    result = run(script, *flags)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def fails_with_one_line(result: subprocess.CompletedProcess, *parts: str):
    """Asserts that a script failed with one line that contains all parts."""
    assert result.returncode not in (0, None)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    for part in parts:
        assert part in result.stderr
