"""Tests of tokenizers in the metadata of GGUF files."""

import json
import pathlib

import pytest
from helpers import gguf_files
from helpers.bad_input import one_line
from helpers.golden_folders import GOLDEN
from helpers.models import tiny_config
from helpers.numpy_models import numpy_spread_params
from helpers.tokenizer_examples import CODE, TEMPLATE

import spsjax
from spsjax import loading, tokenization
from spsjax.models.hf import weights as hf_weights
from spsjax.tokenization import gguf

PATH = pathlib.Path("model.gguf")
TEXTS = (*CODE, "def naïve(😀):\n\n\n  return '½ Привет 日本語'  # a  b", "", " a", "</s>")
KEY = "tokenizer.ggml."


@pytest.mark.parametrize("kind", ["bpe", "sp"])
def test_gguf_tokenizer_gives_the_ids_of_its_files(kind, request):
    original = request.getfixturevalue(kind)
    of = gguf_files.of_bpe if kind == "bpe" else gguf_files.of_sentencepiece
    metadata = of(original) | {"tokenizer.chat_template": TEMPLATE}
    tokenizer = gguf.load(PATH, metadata)
    assert tokenizer == original and tokenizer.vocab_size == original.vocab_size
    assert (tokenizer.bos_id, tokenizer.eos_id) == (original.bos_id, original.eos_id)
    for text in TEXTS:
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == original.decode(ids)
    bare = gguf.load(PATH, metadata | {f"{KEY}add_bos_token": False})
    assert bare.encode("def") == original.encode("def")[1:]
    ids = tokenizer.chat([{"role": "user", "content": " hi "}])
    assert ids == original.encode("<s><|user|>hi</s>\n<|answer|>", whole=False)
    assert ids[0] == original.bos_id and ids.count(original.eos_id) == 1
    with one_line("model.gguf: expected a chat template"):
        gguf.load(PATH, of(original)).chat([{"role": "user", "content": "hi"}])


def test_saved_gguf_model_has_its_tokenizer_and_template(bpe, tmp_path):
    """Also with padding rows of the embedding, for which llama.cpp makes up tokens."""
    config, folder = tiny_config(304), tmp_path / "folder"
    hf_weights.save(folder, config, numpy_spread_params(config, 0), "float32")
    metadata = gguf_files.of_bpe(bpe) | {"tokenizer.chat_template": TEMPLATE}
    metadata[f"{KEY}tokens"] += [f"[PAD{id}]" for id in range(300, 304)]
    metadata[f"{KEY}token_type"] += [5] * 4
    values = {k: v for k, v in gguf_files.metadata_of(folder).items() if v is not None}
    tensors = gguf_files.tensors_of(folder)
    model = spsjax.load(gguf_files.write(tmp_path / "model.gguf", values | metadata, tensors))
    assert model.tokenizer == bpe == loading.load_tokenizer(tmp_path / "model.gguf")
    assert (model.config.vocab_size, model.config.vocab_rows) == (300, 304)
    loading.save(tmp_path / "saved", model)
    saved = spsjax.load(tmp_path / "saved")
    assert saved.tokenizer == bpe and saved.config == model.config
    messages = [{"role": "user", "content": "def"}]
    assert saved.tokenizer.chat(messages) == model.tokenizer.chat(messages)
    assert saved.tokenizer.encode("def") == bpe.encode("def")
    assert spsjax.load_drafter(tmp_path / "saved", model).max_positions == 512


TEXT = "I'LL pay Δ1234½ e\u0301 \n\n  xY/\n"
# Pieces are set apart by bars.
SPLITS = {
    "gpt-2": "I|'|LL| pay| Δ|1234½| e|\u0301| \n\n | xY|/|\n",
    "smollm": "I|'|LL| pay| Δ|1|2|3|4|½| e|\u0301| \n\n | xY|/|\n",
    "llama-bpe": "I|'LL| pay| Δ|123|4½| e|\u0301| \n\n| | xY|/\n",
    "qwen2": "I|'LL| pay| Δ|1|2|3|4|½| \u00e9| \n\n| | xY|/\n",  # é is one letter after NFC
    "tekken": "I|'LL| pay| Δ|1|2|3|4|½| e\u0301| \n\n| | x|Y|/\n",
    "default": "I|'|LL| pay| Δ|123|4½| e|\u0301| \n\n | xY|/|\n",
}


@pytest.mark.parametrize("pre", SPLITS)
def test_rules_of_byte_level_bpe_split_a_text(pre, bpe):
    """The expected pieces were found by hand, by the regular expressions of llama.cpp."""
    model = gguf.load(PATH, gguf_files.of_bpe(bpe, pre))._model
    text = model.normalizer.normalize_str(TEXT) if model.normalizer else TEXT
    spans = [span for _, span in model.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[slice(*span)] for span in spans] == SPLITS[pre].split("|")
    assert json.loads(model.to_str())["model"]["ignore_merges"] == (pre in ("llama-bpe", "tekken"))


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_beginning_of_sequence_has_defaults_of_llama_cpp(pre, bpe):
    metadata = gguf_files.of_bpe(bpe, pre)
    del metadata[f"{KEY}add_bos_token"]
    assert (gguf.load(PATH, metadata).encode("def")[0] == bpe.bos_id) == (pre == "llama-bpe")


BAD = [
    ("bpe", {"model": "bert"}, "tokenizer.ggml.model", "'bert'"),
    ("bpe", {"pre": "unheard-of"}, "tokenizer.ggml.pre", "llama-bpe", "'unheard-of'"),
    ("bpe", {"pre": None}, "tokenizer.ggml.pre", "found none"),
    ("bpe", {"tokens": None}, "tokenizer.ggml.tokens", "found none"),
    ("bpe", {"tokens": [1, 2]}, "tokenizer.ggml.tokens", "a list of texts"),
    ("bpe", {"tokens": ["a"] * 300}, "tokenizer.ggml.tokens", "each text once", "'a'"),
    ("bpe", {"merges": None}, "tokenizer.ggml.merges", "found none"),
    ("bpe", {"merges": ["a b c"]}, "tokenizer.ggml.merges", "'a b c'"),
    ("bpe", {"merges": ["a unknown"]}, "tokenizer.ggml.merges", "unknown"),
    ("bpe", {"token_type": [1, 2]}, "tokenizer.ggml.token_type", "300 numbers", "found 2"),
    ("bpe", {"bos_token_id": 300}, "bos_token_id", "the 300 tokens", "found 300"),
    ("bpe", {"add_bos_token": 1}, "add_bos_token", "true or false"),
    ("sp", {"scores": None}, "tokenizer.ggml.scores", "found none"),
    ("sp", {"token_type": [9] * 320}, "tokenizer.ggml.token_type", "from 1 to 6", "found 9"),
    ("sp", {"tokens": ["a"] * 320}, "model.gguf", "SentencePiece"),
]


@pytest.mark.parametrize(("kind", "changes", "fragments"), [(*case[:2], case[2:]) for case in BAD])
def test_gguf_tokenizer_with_bad_metadata_is_refused(kind, changes, fragments, request):
    original = request.getfixturevalue(kind)
    of = gguf_files.of_bpe if kind == "bpe" else gguf_files.of_sentencepiece
    with one_line("model.gguf", *fragments):
        gguf.load(PATH, of(original) | {f"{KEY}{key}": value for key, value in changes.items()})


def test_gguf_file_without_tokenizer_has_none(tmp_path):
    folder = GOLDEN / "qwen3"
    values, tensors = gguf_files.metadata_of(folder), gguf_files.tensors_of(folder)
    assert spsjax.load(gguf_files.write(tmp_path / "model.gguf", values, tensors)).tokenizer is None
    assert tokenization.exists(tmp_path) is False
