"""Tests of GGUF files against the folders of the same models, and of damaged ones."""

import dataclasses
import struct

import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers import gguf_files
from helpers.bad_input import one_line
from helpers.golden_folders import GOLDEN, copy_golden, equal, rewrite
from helpers.models import tiny_config
from helpers.numpy_models import numpy_spread_params

import spsjax
from spsjax import loading
from spsjax.models import quantization, rope
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding

# GGUF files have no key for the scale of scores in Gemma 2 and 3.
SCALES = {"gemma2": {"query_pre_attn_scalar": 6}, "gemma3": {"query_pre_attn_scalar": 6}}
SCALES |= {"qwen3_moe": {"norm_topk_prob": True}}
FAMILIES = "llama2", "qwen2", "qwen3", "qwen3_moe", "mixtral", *SCALES, "gemma"


def written(folder, path, kind="F32", metadata=(), tensors=()):
    """Writes the model of a folder as a GGUF file, with changes, and returns its path."""
    metadata = gguf_files.metadata_of(folder) | dict(metadata)
    return gguf_files.write(path, metadata, gguf_files.tensors_of(folder) | dict(tensors), kind)


def folder_of(tmp_path, config, kind):
    """Saves a model whose matrices are rounded to a type of ggml, and returns its folder."""
    folder = tmp_path / "folder"
    hf_weights.save(folder, config, numpy_spread_params(config, 0), "float32")
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    matrices = {name: tensor for name, tensor in stored.items() if tensor.ndim > 1}
    rewrite(folder, tensors={name: gguf_files.rounded(x, kind) for name, x in matrices.items()})
    return folder


@pytest.fixture
def llama(tmp_path):
    """A GGUF file of a tiny Llama."""
    return written(GOLDEN / "llama2", tmp_path / "model.gguf")


@pytest.mark.parametrize("name", sorted({*FAMILIES}))
def test_gguf_file_has_config_and_weights_of_its_folder(name, tmp_path):
    """Gemma's norms are rounded, because 1 is added to them in the file."""
    folder = copy_golden(name, tmp_path / "folder", config=lambda raw: raw | SCALES.get(name, {}))
    path = written(folder, tmp_path / "model.gguf")
    ours, expected = (loading.load(source, dtype="float32") for source in (path, folder))
    assert ours.config == expected.config == loading.load_config(path)
    assert jax.tree.structure(ours.params) == jax.tree.structure(expected.params)
    for one, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(expected.params)):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7 if "gemma" in name else 0)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_gguf_weights_equal_those_of_a_rounded_folder(kind, tmp_path):
    config = tiny_config(40, d_model=64, d_ff=96)
    folder = folder_of(tmp_path, config, kind)
    path = written(folder, tmp_path / "model.gguf", kind)
    assert equal(loading.load(path).params, loading.load(folder).params)


def test_gguf_file_loads_onto_a_mesh_and_in_int8(tmp_path):
    folder = folder_of(tmp_path, tiny_config(64), "Q8_0")
    path = written(folder, tmp_path / "model.gguf", "Q8_0")
    mesh = sharding.mesh(2, 4)
    ours, expected = (loading.load(source, mesh, "float32") for source in (path, folder))
    assert equal(ours.params, expected.params)
    query = ours.params["layers"][0]["attention"]["query"]["kernel"]
    assert query.sharding.spec == jax.sharding.PartitionSpec(None, "model")
    target = loading.load(path)
    ours, expected = (
        spsjax.load_drafter(f"int8:{source}", target).params for source in (path, folder)
    )
    assert quantization.kind_of(ours) == "int8" and equal(ours, expected)


def test_gguf_file_with_rope_freqs_has_frequencies_of_llama3(tmp_path):
    folder = GOLDEN / "llama3"
    config = loading.load_config(folder)
    plain, scaled = (
        rope.frequencies(config.head_dim, config.rope_theta, scaling)
        for scaling in ((), config.rope_scaling)
    )
    assert not np.allclose(plain, scaled)
    extra = {"rope_freqs.weight": plain / scaled}
    model = loading.load(written(folder, tmp_path / "model.gguf", tensors=extra))
    ours = rope.frequencies(config.head_dim, config.rope_theta, model.config.rope_scaling)
    np.testing.assert_allclose(ours, scaled, rtol=1e-6)
    plain_config = dataclasses.replace(config, rope_scaling=())
    assert dataclasses.replace(model.config, rope_scaling=()) == plain_config
    assert equal(model.params, loading.load(folder).params)
    loading.save(tmp_path / "saved", model)
    assert loading.load_config(tmp_path / "saved") == model.config


def test_gguf_file_with_yarn_has_config_of_its_folder(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    yarn |= {"rope_theta": 1e4}
    folder = copy_golden(
        "qwen3", tmp_path / "a", config=lambda raw: raw | {"rope_parameters": yarn}
    )
    path = written(folder, tmp_path / "model.gguf")
    assert loading.load_config(path) == loading.load_config(folder)
    assert loading.load_config(path).rope_scaling[0] == "yarn"


def test_gguf_file_of_an_old_gemma2_has_the_caps_of_its_family(tmp_path):
    """Files that are older than the keys of the caps lack them."""
    caps = {"gemma2.attn_logit_softcapping": None, "gemma2.final_logit_softcapping": None}
    config = loading.load_config(written(GOLDEN / "gemma2", tmp_path / "a.gguf", metadata=caps))
    assert (config.attention_softcap, config.logit_softcap) == (50, 30)


def test_gguf_file_names_windows_and_largest_gemma(tmp_path):
    """A list of windows takes precedence over every sixth layer; the 27B models scale by width."""
    folder = GOLDEN / "gemma3"
    pattern = {"gemma3.attention.sliding_window_pattern": [True, False] * 3 + [True]}
    path = written(folder, tmp_path / "listed.gguf", metadata=pattern)
    assert loading.load_config(path).windows == (8, 0)
    names = {f"{name}.weight": np.ones(1, np.float32) for name in map(str, range(62))}
    path = written(folder, tmp_path / "a.gguf", metadata={"gemma3.block_count": 62}, tensors=names)
    assert loading.load_config(path).query_scale == 4**-0.5  # of d_model 16 and 4 heads


def test_gguf_file_of_several_ends_has_all_ids(tmp_path):
    tokens = [f"t{id}" for id in range(40)]
    tokens[7], tokens[8] = "<|im_end|>", "<|endoftext|>"
    values = {"tokens": tokens, "token_type": [1] * 7 + [3] + [1] * 32, "eot_token_id": 5}
    values = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    path = written(GOLDEN / "llama2", tmp_path / "model.gguf", metadata=values)
    # Token 8 is not a control token, so that a text may have it.
    assert loading.load_config(path).eos_ids == (2, 5, 7)


KEY = "llama.attention.head_count"
BAD_METADATA = [
    ({"general.architecture": "falcon"}, "general.architecture", "gemma3", "'falcon'"),
    ({"general.architecture": None}, "general.architecture", "found none"),
    ({KEY: None}, KEY, "found none"),
    ({KEY: 3}, "expected a multiple"),
    ({KEY: [4, 4]}, KEY, "[4, 4]"),
    ({"llama.block_count": 2_000_000}, "llama.block_count", "number of tensors", "2000000"),
    ({"llama.block_count": 3}, "expected a tensor blk.2.attn_k.weight, found none"),
    ({"llama.block_count": 1}, "expected no tensor 'blk.1.attn_k.weight'"),
    ({"llama.attention.value_length": 8}, "value_length", "expected 4, found 8"),
    ({"llama.rope.dimension_count": 2}, "rope.dimension_count", "expected 4, found 2"),
    ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type", "'longrope'"),
    ({"llama.embedding_length": 32}, "token_embd.weight: expected shape [40, 32], found [40, 16]"),
    ({"llama.expert_count": 4}, "expert"),
    ({"split.count": 3}, "one of 3 files", "llama-gguf-split --merge"),
    ({"general.alignment": 0}, "general.alignment"),
    ({"tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens", "a list"),
]


@pytest.mark.parametrize(("changes", "fragments"), [(case[0], case[1:]) for case in BAD_METADATA])
def test_gguf_file_with_bad_metadata_is_refused(changes, fragments, tmp_path):
    folder, path = GOLDEN / "llama2", tmp_path / "model.gguf"
    alignment = changes.get("general.alignment")
    written(folder, path, metadata=changes if alignment is None else {})
    if alignment is not None:  # the library would not write it
        key = b"llama.block_count"
        raw = path.read_bytes().replace(key, b"general.alignment", 1)
        start = raw.index(b"general.alignment") + len(key) + 4
        path.write_bytes(raw[:start] + struct.pack("<I", 0) + raw[start + 4 :])
    with one_line(str(path), *fragments):
        spsjax.load(path)


@pytest.mark.parametrize(
    ("tensors", "fragments"),
    [
        ({"extra": np.ones((0, 3), np.float32)}, ["expected elements of 'extra', found shape"]),
        ({"output_norm.weight": None}, ["expected a tensor output_norm.weight, found none"]),
        ({"token_embd.weight": None}, ["expected a tensor token_embd.weight, found none"]),
        ({"extra": np.ones(3, np.float32)}, ["expected no tensor 'extra'"]),
        (
            {"blk.0.ffn_up.weight": np.ones((24, 8), np.float32)},
            ["blk.0.ffn_up.weight: expected shape [24, 16], found [24, 8]"],
        ),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, ["rope_freqs.weight", "[3]"]),
    ],
)
def test_gguf_file_with_wrong_tensors_is_refused(tensors, fragments, tmp_path):
    path = written(GOLDEN / "llama2", tmp_path / "model.gguf", tensors=tensors)
    with one_line(str(path), *fragments):
        spsjax.load(path)


def test_gguf_file_that_ends_early_is_refused(llama):
    """Of any length: a file cut off in the header, in the metadata, or in the tensors."""
    whole = llama.read_bytes()
    for length in (*range(0, 300, 7), *range(300, len(whole), 997), len(whole) - 33):
        llama.write_bytes(whole[:length])
        with one_line(str(llama)):
            loading.load_config(llama)
    with one_line("ends within the tensor"):
        loading.load_config(llama)


def test_gguf_file_with_any_damaged_byte_is_refused_or_read(llama):
    """No damage of the header leads to a traceback of another error, or to an endless loop."""
    whole = llama.read_bytes()
    for position in range(8, 900, 13):
        for value in (0xFF, whole[position] ^ 8):
            damaged = bytearray(whole)
            damaged[position] = value
            llama.write_bytes(damaged)
            try:
                loading.load_config(llama)
            except spsjax.InputError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("start", "fragment"),
    [
        (b"text", "found a file of another kind"),
        (b"", "found a file of another kind"),
        (b"GGUF\3", "found its first 5 bytes"),
        (b"GGUF" + struct.pack(">I", 3), "found a big-endian one"),
        (b"GGUF" + struct.pack("<I", 1), "expected GGUF version 2 or 3, found 1"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    ],
)
def test_file_of_another_kind_is_refused(start, fragment, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    with one_line(str(path), fragment):
        spsjax.load(path)


@pytest.mark.parametrize(
    ("number", "fragments"),
    [
        (999, ["a known type of 'output.weight', found type 999"]),
        (24, ["output.weight: expected a type of weights", "found I8"]),
    ],
)
def test_gguf_tensor_of_unknown_type_is_refused(number, fragments, llama):
    """A type that the format does not have, and one of no weights."""
    raw = bytearray(llama.read_bytes())
    start = raw.index(b"output.weight") + len(b"output.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", raw, start) == (0,)  # F32
    struct.pack_into("<I", raw, start, number)
    llama.write_bytes(raw)
    with one_line(str(llama), *fragments):
        spsjax.load(llama)
