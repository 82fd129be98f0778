"""Tests of damaged model folders: every kind of damage is an error message of one line."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy
from helpers.bad_input import one_line
from helpers.golden_folders import edit_config

from spsjax import loading

UP = "model.layers.1.mlp.up_proj.weight"

# config.json.


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"],
    ids=["empty", "open", "list", "null", "not utf-8", "deep", "long number"],
)
def test_config_that_is_not_a_json_object_is_refused(model_folder, text):
    (model_folder / "config.json").write_bytes(text)
    with one_line("config.json", "JSON"):
        loading.load(model_folder)


COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


# One check reads all sizes, and one all numbers.
BAD_SIZES = [("vocab_size", value) for value in ("8", -1, 8.0, True, [8], {}, 10**12)]
BAD_NUMBERS = [("rope_theta", value) for value in ("8", -1, True, [8])]
BAD_NUMBERS += [("rms_norm_eps", value) for value in (0, float("nan"), float("inf"), 10**400)]


@pytest.mark.parametrize(("field", "value"), BAD_SIZES + [(field, 0) for field in COUNTS])
def test_config_size_not_a_positive_integer_is_refused(model_folder, field, value):
    edit_config(model_folder, **{field: value})
    with one_line("config.json", field, "integer", repr(value)):
        loading.load(model_folder)


@pytest.mark.parametrize(("field", "value"), BAD_NUMBERS)
def test_config_number_not_positive_or_finite_is_refused(model_folder, field, value):
    edit_config(model_folder, **{field: value})
    with one_line("config.json", field, "positive number"):
        loading.load(model_folder)


@pytest.mark.parametrize(
    "field", [name for name in COUNTS if name not in ("num_key_value_heads", "head_dim")]
)
def test_config_without_a_size_is_refused(model_folder, field):
    edit_config(model_folder, **{field: None})
    with one_line("config.json", field, "found none"):
        loading.load(model_folder)


UPSIDE_DOWN = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "value_found"),
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
        ("rope_parameters", {"rope_type": "ntk"}, "'ntk'"),
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
def test_config_of_unsupported_model_is_refused(model_folder, field, value, value_found):
    edit_config(model_folder, **{field: value})
    with one_line("config.json", f"found {value_found}"):
        loading.load(model_folder)


def test_config_special_ids_beyond_vocabulary_are_dropped(model_folder):
    """Special ids beyond the vocabulary are dropped, as in a GPT-2 with a smaller vocabulary."""
    edit_config(model_folder, bos_token_id=50_256, eos_token_id=[3, 50_256])
    config = loading.load(model_folder).config
    assert (config.bos_id, config.eos_ids) == (None, (3,))


def test_config_heads_not_dividing_width_are_refused(model_folder):
    edit_config(model_folder, head_dim=None, num_attention_heads=12)
    with one_line("hidden_size", "num_attention_heads=12"):
        loading.load(model_folder)


# Weights.


@pytest.mark.parametrize("size", [0, 4, 8, 50, 30_000, -1, +1])
def test_weights_of_wrong_length_are_refused(model_folder, size):
    path = model_folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" if size == 1 else whole[:size])
    with one_line("model.safetensors", "whole safetensors file"):
        loading.load(model_folder)


@pytest.mark.parametrize("text", [b"\xff" * 2000, b"\0" * 2000, b"version https://git-lfs"])
def test_weights_of_another_format_are_refused(model_folder, text):
    (model_folder / "model.safetensors").write_bytes(text)
    with one_line("model.safetensors", "whole safetensors file"):
        loading.load(model_folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.model"])
def test_pointer_of_git_lfs_is_named_with_what_to_do(model_folder, name):
    (model_folder / name).write_bytes(POINTER)
    with one_line(name, "expected the file, found a Git LFS pointer to it", "git lfs pull"):
        loading.load(model_folder)


def test_missing_weights_are_refused(model_folder):
    (model_folder / "model.safetensors").unlink()
    with one_line(str(model_folder), "model.safetensors", "neither"):
        loading.load(model_folder)
    (model_folder / "model.safetensors").mkdir()
    with one_line("model.safetensors", "none"):
        loading.load(model_folder)


def test_unreadable_weights_are_refused(model_folder, monkeypatch):
    real = pathlib.Path.open

    def opened(path, *args, **options):
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(pathlib.Path, "open", opened)
    with one_line("model.safetensors", "Permission denied"):
        loading.load(model_folder)


def test_tied_head_unequal_to_embedding_is_refused(model_folder):
    edit_config(model_folder, tie_word_embeddings=True)
    with one_line("lm_head.weight", "tie_word_embeddings"):
        loading.load(model_folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickled_weights_are_not_opened(model_folder, name):
    (model_folder / "model.safetensors").unlink()
    (model_folder / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/oh'\ntR.")
    with one_line(str(model_folder), "pickle", "safetensors.torch.save_file"):
        loading.load(model_folder)


@pytest.mark.parametrize(
    ("name", "tensor", "fragments"),
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
def test_tensor_missing_or_unfitting_is_refused(model_folder, name, tensor, fragments):
    """A tensor that is missing, has the wrong shape or type, or is unknown, is refused by name."""
    path = model_folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    safetensors.numpy.save_file(tensors, path)
    with one_line(str(model_folder), *fragments):
        loading.load(model_folder)


def test_config_with_more_layers_than_stored_is_refused(model_folder):
    edit_config(model_folder, num_hidden_layers=3)
    with one_line("model.layers.2.", "found none"):
        loading.load(model_folder)
    edit_config(model_folder, num_hidden_layers=1_000_000)  # refused before any layer is built
    with one_line("1000000 layers"):
        loading.load(model_folder)


@pytest.mark.parametrize(
    ("file", "fragment"),
    [("gone.safetensors", "gone.safetensors"), (3, "3"), ("../x", "'../x'"), (".", "'.'")],
)
def test_missing_shard_is_refused(model_folder, file, fragment):
    names = safetensors.numpy.load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").rename(model_folder / "first.safetensors")
    weight_map = dict.fromkeys(names, "first.safetensors") | {UP: file}
    index = model_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with one_line(fragment):
        loading.load(model_folder)


def test_index_that_contradicts_its_shard_is_refused(model_folder):
    tensors = safetensors.numpy.load_file(model_folder / "model.safetensors")
    names = list(tensors)
    (model_folder / "model.safetensors").unlink()
    del tensors[UP]
    safetensors.numpy.save_file(tensors, model_folder / "first.safetensors")
    weight_map = dict.fromkeys(names, "first.safetensors")
    index = model_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with one_line("first.safetensors", UP, "found none"):
        loading.load(model_folder)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"weight_map": []}', b'{"weight_map": {}}'])
def test_index_without_tensors_is_refused(model_folder, text):
    (model_folder / "model.safetensors").unlink()
    (model_folder / "model.safetensors.index.json").write_bytes(text)
    with one_line(str(model_folder)):
        loading.load(model_folder)


# Tokenizer.


def test_damaged_tokenizer_is_refused(model_folder, tiny_tokenizer):
    whole = tiny_tokenizer.path.read_bytes()
    invalid = whole.replace(b"return", b"\xffeturn"), whole.replace(b"</s>", b"</s\xff")
    for damaged in (b"", b"text", b"\0" * 99, whole[: len(whole) // 2], whole[:-3], *invalid):
        (model_folder / "tokenizer.model").write_bytes(damaged)
        with one_line("tokenizer.model", "SentencePiece"):
            loading.load(model_folder)
    (model_folder / "tokenizer.model").unlink()
    (model_folder / "tokenizer.model").mkdir()
    with one_line("tokenizer.model", "tokenizer"):
        loading.load(model_folder)


def test_tokenizer_larger_than_the_model_is_refused(model_folder, tiny_tokenizer):
    shutil.copy(tiny_tokenizer.path, model_folder / "tokenizer.model")
    with one_line("tokenizer.model", "64", "300"):
        loading.load(model_folder)


def test_encode_of_invalid_unicode_is_refused(tiny_tokenizer):
    with one_line("text", "Unicode"):
        tiny_tokenizer.encode("lone \ud800")


@pytest.mark.parametrize("folder", [3, None])
def test_save_to_what_is_not_a_path_is_refused(model_folder, folder):
    with one_line("folder", type(folder).__name__):
        loading.save(folder, loading.load(model_folder))
