"""The scripts as people run them, and a tiny pair of models for them."""

import os
import pathlib
import subprocess
import sys

import jax

from spsjax import tokenization
from spsjax.data import documents
from spsjax.models import transformer
from spsjax.models.hf import weights as hf_weights

ROOT = pathlib.Path(__file__).parent.parent


def tiny_pair(folder: pathlib.Path) -> list[str]:
    """Flags that name a target and a draft, each with a tokenizer, made in the folder."""
    texts = [text for name, text in documents.stdlib().items() if documents.is_held_out(name)]
    pieces = tokenization.train(texts[:3], folder / "tokenizer.model", 400)
    for seed, name in enumerate(("target", "draft")):
        config = transformer.Config(
            vocab_size=400, d_model=16, d_ff=16, num_layers=1, num_heads=2, num_kv_heads=1,
            head_dim=8, max_positions=256, bos_id=pieces.bos_id, eos_ids=(pieces.eos_id,),
        )  # fmt: skip
        hf_weights.save(folder / name, config, transformer.init(config, jax.random.key(seed)))
        (folder / name / "tokenizer.model").write_bytes(pieces.path.read_bytes())
    return [f"--target={folder / 'target'}", f"--draft={folder / 'draft'}"]


def run(script: str, *flags: str, path: pathlib.Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *flags],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        cwd=path,
        timeout=600,
    )


def succeeds(script: str, *flags: str) -> subprocess.CompletedProcess:
    result = run(script, *flags)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def fails_with_one_line(result: subprocess.CompletedProcess, *pieces: str):
    assert result.returncode not in (0, None)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    for piece in pieces:
        assert piece in result.stderr
