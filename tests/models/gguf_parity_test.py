"""Comparisons of real GGUF files with transformers, which loads them, too.

SPSJAX_GGUF_FILES=one.gguf:two.gguf python -m pytest tests/models/gguf_parity_test.py

It needs memory for three copies of a model in float32.
"""

import os
import pathlib

import jax
import numpy as np
import pytest

import spsjax
from spsjax.training import step as train_step

FILES = os.environ.get("SPSJAX_GGUF_FILES", "").split(os.pathsep)
TEXTS = (
    "Hello, world! It's 2024 and pi is 3.14159.",
    "def f(x):\n    return [i**2 for i in range(x)]  # squares\n\n\tpass\n",
    "naïve 😀👩‍👩‍👧 Привет мир 日本語テスト العربية हिन्दी 한국어",
    "  leading   and trailing  \n\n\nlines\r\n\t\ttabs",
    "a" * 50,
    "e\u0301 \u00a0nbsp \u200b zero ▁under▁score 100% $5.00 <=> ~~ ^_^ `x`",
)
MARKED = "<|im_start|>user\nHi<|im_end|>\n<start_of_turn>user\nHi<end_of_turn>\n"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue? 😀"},
]


@pytest.fixture(scope="module", params=FILES, ids=lambda path: pathlib.Path(path).name)
def path(request):
    """A GGUF file that the user names; skips without one, and without transformers."""
    if not request.param:
        pytest.skip("needs GGUF files: SPSJAX_GGUF_FILES=one.gguf:two.gguf")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason="needs the extra: pip install -e '.[parity]'")
    return pathlib.Path(request.param)


@pytest.fixture(scope="module")
def model(path):
    return spsjax.load(path, dtype="float32")


def test_gguf_logits_equal_those_of_transformers(path, model):
    import torch
    import transformers

    peer = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = np.asarray([model.tokenizer.encode("".join(TEXTS))])
    with torch.no_grad():
        expected = peer(torch.tensor(ids)).logits.numpy()
    output = jax.jit(train_step.forward, static_argnums=0)(model.config, model.params, ids)
    logits = output.logits
    np.testing.assert_allclose(logits, expected[..., : logits.shape[-1]], rtol=0, atol=2e-3)


def test_gguf_token_ids_equal_those_of_transformers(path, model):
    """Not of characters such as ½, before which transformers ignores the rules of the file."""
    import transformers

    peer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = model.tokenizer
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == peer(text)["input_ids"]
        assert ours.decode(ids) == peer.decode(ids, skip_special_tokens=True)
    assert ours.encode(MARKED, whole=False) == peer.encode(MARKED, add_special_tokens=False)
    if ours.has_template:
        ids = peer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
        assert ours.chat(MESSAGES) == ids
