"""A bad name or a damaged folder gets one clear line; each is damaged in one way at a time."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil
import sys
import types

import jax
import numpy as np
import pytest
import safetensors.numpy
from bad_input import one_line
from conftest import spread_params, tiny_config

import spsjax
from spsjax import loading, tokenization
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with a sound model of 64 tokens and two layers."""
    folder = tmp_path_factory.mktemp("models") / "sound"
    config = tiny_config(64, num_layers=2)
    hf_weights.save(folder, config, spread_params(config, 0), "float32")
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    """A copy of the sound folder, to be damaged."""
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tokenizer of 300 pieces."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return tokenization.train(["def f(x):\n    return x\n" * 9, "import os\n" * 9], path, 300)


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_load_of_sound_folder_succeeds(folder):
    assert loading.load(folder).config.num_layers == 2


# Names.


@pytest.mark.parametrize("name", ["no/such/model", "", "../..", "/", "a\0b", "x" * 5000, "a/.."])
def test_load_of_unknown_name_is_refused(name, monkeypatch, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with one_line("expected a model folder"):
        spsjax.load(name)


@pytest.mark.parametrize("name", [None, 3, b"x", ["a"]])
def test_load_of_name_of_another_type_is_refused(name):
    with one_line("name", type(name).__name__):
        spsjax.load(name)


def test_load_of_empty_folder_or_file_is_refused(tmp_path):
    with one_line(str(tmp_path), "config.json"):
        spsjax.load(tmp_path)
    (tmp_path / "file").write_text("text")
    with one_line("file", "found a file"):
        spsjax.load(tmp_path / "file")


# config.json.


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"],
    ids=["empty", "open", "list", "null", "not utf-8", "deep", "long number"],
)
def test_config_that_is_not_a_json_object_is_refused(folder, text):
    (folder / "config.json").write_bytes(text)
    with one_line("config.json", "JSON"):
        loading.load(folder)


COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("value", ["8", -1, 0, 8.0, True, [8], {}, 10**12])
@pytest.mark.parametrize("field", COUNTS)
def test_config_size_not_a_positive_integer_is_refused(folder, field, value):
    edit(folder, **{field: value})
    with one_line("config.json", field, "integer", repr(value)):
        loading.load(folder)


@pytest.mark.parametrize("value", ["8", -1, 0, True, [8], float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps"])
def test_config_number_not_positive_or_finite_is_refused(folder, field, value):
    edit(folder, **{field: value})
    with one_line("config.json", field, "positive number"):
        loading.load(folder)


@pytest.mark.parametrize(
    "field", [name for name in COUNTS if name not in ("num_key_value_heads", "head_dim")]
)
def test_config_without_a_size_is_refused(folder, field):
    edit(folder, **{field: None})
    with one_line("config.json", field, "found none"):
        loading.load(folder)


UPSIDE_DOWN = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("model_type", "bloom", "'bloom'"),
        ("model_type", None, "none"),
        ("hidden_act", "gelu", "'gelu'"),
        ("attention_bias", True, "True"),
        ("mlp_bias", True, "True"),
        ("add_cross_attention", True, "True"),
        ("use_bidirectional_attention", True, "True"),
        ("scale_attn_by_inverse_layer_idx", True, "True"),
        ("scale_attn_weights", False, "False"),
        ("decoder_sparse_step", 2, "2"),
        ("mlp_only_layers", [0], "[0]"),
        ("attention_bias", "false", "'false'"),
        ("tie_word_embeddings", 1, "1"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "none"),
        ("rope_scaling", {"type": "linear", "factor": -2.0}, "-2.0"),
        ("rope_scaling", UPSIDE_DOWN, "4.0"),
        ("rope_scaling", [], "[]"),
        ("rope_parameters", {"rope_type": "yarn"}, "'yarn'"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "0.5"),
        ("rope_parameters", {"full_attention": {"rope_theta": 1.0}}, "{'full_attention'"),
        ("quantization_config", {"quant_method": "fp8"}, "one"),
        ("bos_token_id", "x", "'x'"),
        ("eos_token_id", [2, -1], "[2, -1]"),
        ("eos_token_id", -1, "-1"),
        ("eos_token_id", True, "True"),
        ("eos_token_id", "2", "'2'"),
        ("num_attention_heads", 7, "7"),
        ("num_key_value_heads", 3, "8"),
        ("head_dim", 3, "3"),
    ],
)
def test_config_of_unsupported_model_is_refused(folder, field, value, found):
    edit(folder, **{field: value})
    with one_line("config.json", f"found {found}"):
        loading.load(folder)


def test_config_special_ids_beyond_vocabulary_are_dropped(folder):
    """Special ids beyond the vocabulary are dropped, as in a GPT-2 with a smaller vocabulary."""
    edit(folder, bos_token_id=50_256, eos_token_id=[3, 50_256])
    config = loading.load(folder).config
    assert (config.bos_id, config.eos_ids) == (None, (3,))


def test_config_heads_not_dividing_width_are_refused(folder):
    edit(folder, head_dim=None, num_attention_heads=12)
    with one_line("hidden_size", "num_attention_heads=12"):
        loading.load(folder)


# The hub.


def test_load_from_hub_downloads_only_needed_files(folder, monkeypatch):
    """A repository of the Hub loads by name and revision; weights are downloaded for a model alone.

    A repository without safetensors weights, or one that the Hub refuses, is an error of one line.
    """
    hub = types.SimpleNamespace(calls=[])

    def snapshot_download(repository, *, revision, allow_patterns):
        weights = [name for name in allow_patterns if name.endswith(".safetensors")]
        hub.calls.append((repository, revision, weights))
        assert {"config.json", "model.safetensors.index.json", "merges.txt"} <= {*allow_patterns}
        if repository == "someone/none":
            raise OSError("401 Client Error\nRepository Not Found")
        return str(folder)

    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: hub)
    assert loading.load("hf://someone/tiny").config == loading.load(folder).config
    assert loading.load_config("hf://someone/tiny@v2").vocab_size == 64
    assert loading.load_tokenizer("hf://someone/tiny") is None
    first, second = (("someone/tiny", None, names) for names in ([], ["model.safetensors"]))
    assert hub.calls == [first, second, ("someone/tiny", "v2", []), first]  # weights for one alone
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "part1.safetensors", "b": "part1.safetensors"}}')
    loading.load("hf://someone/tiny")
    assert hub.calls[-1][2] == ["model.safetensors", "part1.safetensors"]
    index.unlink()
    (folder / "model.safetensors").unlink()
    with one_line("hf://someone/tiny", "neither", "pickle", "save_pretrained"):
        loading.load("hf://someone/tiny")
    with one_line("hf://someone/none", "Repository Not Found"):
        loading.load("hf://someone/none")


def test_load_from_hub_without_its_library_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with one_line("hf://someone/tiny", "huggingface_hub"):
        loading.load("hf://someone/tiny")


# Weights.


@pytest.mark.parametrize("size", [0, 4, 8, 50, 30_000, -1, +1])
def test_weights_of_wrong_length_are_refused(folder, size):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" if size == 1 else whole[:size])
    with one_line("model.safetensors", "whole safetensors file"):
        loading.load(folder)


@pytest.mark.parametrize("text", [b"\xff" * 2000, b"\0" * 2000, b"version https://git-lfs"])
def test_weights_of_another_format_are_refused(folder, text):
    (folder / "model.safetensors").write_bytes(text)
    with one_line("model.safetensors", "whole safetensors file"):
        loading.load(folder)


def test_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    with one_line(str(folder), "model.safetensors", "neither"):
        loading.load(folder)
    (folder / "model.safetensors").mkdir()
    with one_line("model.safetensors", "none"):
        loading.load(folder)


def test_unreadable_weights_are_refused(folder, monkeypatch):
    real = pathlib.Path.open

    def opened(path, *args, **options):
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(pathlib.Path, "open", opened)
    with one_line("model.safetensors", "Permission denied"):
        loading.load(folder)


def test_tied_head_unequal_to_embedding_is_refused(folder):
    edit(folder, tie_word_embeddings=True)
    with one_line("lm_head.weight", "tie_word_embeddings"):
        loading.load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickled_weights_are_not_opened(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/oh'\ntR.")
    with one_line(str(folder), "pickle", "save_pretrained"):
        loading.load(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "parts"),
    [
        (UP, None, [UP, "found none"]),
        ("lm_head.weight", None, ["lm_head.weight", "found none"]),
        (UP, np.zeros((32, 33), np.float32), [UP, "[32, 32]", "[32, 33]"]),
        (UP, np.zeros(1024, np.float32), [UP, "[32, 32]", "[1024]"]),
        (UP, np.zeros((), np.float32), [UP, "[32, 32]", "[]"]),
        (UP, np.zeros((32, 32), np.int8), [UP, "floating-point", "I8"]),
        ("model.layers.0.self_attn.q_proj.bias", np.zeros(32, np.float32), ["q_proj.bias"]),
        ("model.layers.2.mlp.up_proj.weight", np.zeros((32, 32), np.float32), ["layers.2"]),
    ],
    ids=["missing", "no head", "wide", "flat", "scalar", "integers", "bias", "one layer more"],
)
def test_tensor_missing_or_unfitting_is_refused(folder, name, tensor, parts):
    """A tensor that is missing, has the wrong shape or type, or is unknown, is refused by name."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    safetensors.numpy.save_file(tensors, path)
    with one_line(str(folder), *parts):
        loading.load(folder)


def test_config_with_more_layers_than_stored_is_refused(folder):
    edit(folder, num_hidden_layers=3)
    with one_line("model.layers.2.", "found none"):
        loading.load(folder)
    edit(folder, num_hidden_layers=1_000_000)  # at once, without building a million layers first
    with one_line("1000000 layers"):
        loading.load(folder)


@pytest.mark.parametrize(
    ("file", "part"),
    [("gone.safetensors", "gone.safetensors"), (3, "3"), ("../x", "'../x'"), (".", "'.'")],
)
def test_missing_shard_is_refused(folder, file, part):
    names = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    weight_map = dict.fromkeys(names, "first.safetensors") | {UP: file}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with one_line(part):
        loading.load(folder)


def test_index_that_contradicts_its_shard_is_refused(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    names = list(tensors)
    (folder / "model.safetensors").unlink()
    del tensors[UP]
    safetensors.numpy.save_file(tensors, folder / "first.safetensors")
    weight_map = dict.fromkeys(names, "first.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with one_line("first.safetensors", UP, "found none"):
        loading.load(folder)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"weight_map": []}', b'{"weight_map": {}}'])
def test_index_without_tensors_is_refused(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_bytes(text)
    with one_line(str(folder)):
        loading.load(folder)


# Tokenizer.


def test_damaged_tokenizer_is_refused(folder, pieces):
    whole = pieces.path.read_bytes()
    for damaged in (b"", b"text", b"\0" * 99, whole[: len(whole) // 2], whole[:-3]):
        (folder / "tokenizer.model").write_bytes(damaged)
        with one_line("tokenizer.model", "SentencePiece"):
            loading.load(folder)
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.model").mkdir()
    with one_line("tokenizer.model", "tokenizer"):
        loading.load(folder)


def test_tokenizer_larger_than_the_model_is_refused(folder, pieces):
    shutil.copy(pieces.path, folder / "tokenizer.model")
    with one_line("tokenizer.model", "64", "300"):
        loading.load(folder)


def test_encode_of_invalid_unicode_is_refused(pieces):
    with one_line("text", "Unicode"):
        pieces.encode("lone \ud800")


# Where the weights go, and as what.


@pytest.mark.parametrize("dtype", ["foo", "int8", 3, [1], "float8_e4m3fn", "complex64", "float64"])
def test_load_as_unusable_dtype_is_refused(folder, dtype):
    with one_line("dtype", "floating-point"):
        loading.load(folder, dtype=dtype)


def test_load_on_mesh_not_dividing_heads_is_refused(folder):
    with one_line("num_heads", "5", "8"):
        loading.load(folder, mesh=sharding.mesh(1, 5))


@pytest.mark.parametrize("shape", [(1, 9), (0, 1), (-1, 1)])
def test_mesh_larger_than_the_machine_is_refused(shape):
    with one_line("mesh", f"{shape[0]} x {shape[1]}"):
        sharding.mesh(*shape)


def test_load_on_mesh_of_another_kind_is_refused(folder):
    with one_line("mesh", "str"):
        loading.load(folder, mesh="2x4")
    with one_line("mesh", "data and model", "rows"):
        loading.load(folder, mesh=jax.make_mesh((8,), ("rows",)))


# Saving.


def test_saved_model_loads_unchanged(folder, pieces, tmp_path):
    """Config, tokenizer and parameters survive saving and loading, and all files have one mode."""
    model = dataclasses.replace(loading.load(folder), tokenizer=pieces)
    config = dataclasses.replace(model.config, vocab_size=300)
    model = dataclasses.replace(model, config=config, params=spread_params(config, 1))
    loading.save(tmp_path / "saved", model, "float32")
    again = loading.load(tmp_path / "saved")
    assert (again.config, again.tokenizer) == (model.config, pieces)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    modes = {path.stat().st_mode for path in (tmp_path / "saved").iterdir()}
    assert len(modes) == 1  # whoever reads the config may read the weights
    # Another model's tokenizer does not stay behind.
    loading.save(tmp_path / "saved", dataclasses.replace(model, tokenizer=None))
    assert loading.load(tmp_path / "saved").tokenizer is None


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", "float64", "nonsense"])
def test_save_as_unusable_dtype_leaves_the_file_unchanged(folder, dtype):
    before = (folder / "model.safetensors").read_bytes()
    with one_line("dtype", dtype):
        loading.save(folder, loading.load(folder), dtype)
    assert (folder / "model.safetensors").read_bytes() == before


def test_save_of_no_model_or_to_no_folder_is_refused(folder):
    with one_line("config.json", "folder"):
        loading.save(folder / "config.json", loading.load(folder))
    with one_line("model", "NoneType"):
        loading.save(folder, None)
