"""Tests of reading and writing weights in the Hugging Face layout."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers.bad_input import one_line
from helpers.golden_folders import GOLDEN, assert_same_model, copy_golden, equal
from helpers.models import tiny_config
from helpers.numpy_models import numpy_spread_params

from spsjax import loading
from spsjax.models import transformer
from spsjax.models.hf import config_json, families
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding


def shard(folder, count):
    """Splits model.safetensors into `count` files and an index."""
    single = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(single)
    single.unlink()
    weight_map = {}
    for index in range(count):
        name = f"model-{index + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[index::count])
        safetensors.numpy.save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_of_saved_model_restores_it(tmp_path, tie, dtype):
    config = tiny_config(24, num_layers=2, tie_embeddings=tie, bos_id=1, eos_ids=(2,))
    type_ = jnp.dtype(dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(type_), numpy_spread_params(config, 0))
    hf_weights.save(tmp_path, config, params, dtype)
    assert hf_weights.read_config(tmp_path) == config
    assert equal(hf_weights.read_params(tmp_path, config, dtype), params)
    assert ("lm_head.weight" in safetensors.numpy.load_file(tmp_path / "model.safetensors")) != tie
    assert not list(tmp_path.glob("*.partial"))


def test_bfloat16_weights_are_widened_exactly(tmp_path):
    config = tiny_config(24)
    params = numpy_spread_params(config, 0)
    hf_weights.save(tmp_path, config, params)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), rounded)


def test_shards_with_index_load_like_one_file(tmp_path):
    config = tiny_config(24, num_layers=2)
    params = numpy_spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    shard(tmp_path, 3)
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), params)


def test_save_over_shards_replaces_them(tmp_path):
    config = tiny_config(24)
    hf_weights.save(tmp_path, config, numpy_spread_params(config, 0), "float32")
    shard(tmp_path, 2)
    params = numpy_spread_params(config, 1)
    hf_weights.save(tmp_path, config, params, "float32")
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), params)


def test_kernels_are_stored_with_outputs_first(tmp_path):
    config = tiny_config(24, d_ff=40)
    params = numpy_spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    kernel = params["layers"][0]["ffn"]["up"]["kernel"]
    assert np.array_equal(stored["model.layers.0.mlp.up_proj.weight"], kernel.T)
    assert np.array_equal(stored["model.embed_tokens.weight"], params["embed"]["embedding"])


def test_rotary_frequencies_and_tied_head_are_ignored(tmp_path):
    config = tiny_config(24, tie_embeddings=True)
    params = numpy_spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file(tensors, path)
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), params)


def test_gpt2_without_prefix_and_with_masks_loads(tmp_path):
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32),
        "h.1.attn.masked_bias": np.ones((), np.float32),
    }
    folder = copy_golden(
        "gpt2", tmp_path / "x", lambda key: key.removeprefix("transformer."), **masks
    )
    assert_same_model(folder, "gpt2")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("inside", [None, 5])
def test_language_model_of_multimodal_gemma_loads(tmp_path, prefix, inside):
    """Its config is nested; special tokens stand outside of it, or in both places."""

    def wrap(raw):
        special = {key: raw.pop(key) for key in ("bos_token_id", "eos_token_id")}
        raw["eos_token_id"] = inside
        return {"model_type": "gemma3", "text_config": raw, "vision_config": {}, **special}

    folder = copy_golden(
        "gemma3", tmp_path / "x", lambda key: key.replace("model.", prefix, 1), wrap,
        **{"vision_tower.vision_model.post_layernorm.bias": np.ones(3, np.float32)},
    )  # fmt: skip
    assert_same_model(folder, "gemma3")


def test_untied_head_of_gpt2_is_stored_with_outputs_first(tmp_path):
    """Other matrices of GPT-2 are stored with inputs first."""
    config = dataclasses.replace(config_json.read(GOLDEN / "gpt2"), tie_embeddings=False)
    params = numpy_spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert stored["lm_head.weight"].shape == (config.vocab_size, config.d_model)
    assert stored["transformer.h.0.mlp.c_fc.weight"].shape == (config.d_model, config.d_ff)
    np.testing.assert_array_equal(stored["lm_head.weight"].T, params["head"]["kernel"])
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), params)


def test_tensor_under_two_names_is_refused(tmp_path):
    stray = np.ones((40, 16), np.float32)
    folder = copy_golden("qwen3", tmp_path / "x", **{"embed_tokens.weight": stray})
    with one_line("embed_tokens.weight", "once"):
        loading.load(folder)


def test_each_device_reads_only_its_slice(tmp_path, monkeypatch):
    mesh, read = sharding.mesh(1, 8), []
    config = tiny_config(64, num_layers=1, num_kv_heads=8)
    hf_weights.save(tmp_path, config, numpy_spread_params(config, 0), "float32")
    opened = hf_weights.safetensors.safe_open

    class Watched:
        def __init__(self, stored):
            self.stored = stored
            self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

        def __getitem__(self, index):
            array = self.stored[index]
            read.append(array.size / np.prod(self.get_shape()))
            return array

    class File:
        def __init__(self, *args, **options):
            self.file = opened(*args, **options)
            self.keys = self.file.keys

        def get_slice(self, name):
            return Watched(self.file.get_slice(name))

    monkeypatch.setattr(hf_weights.safetensors, "safe_open", File)
    loading.load(tmp_path, mesh)
    assert {1 / 8, 1.0} == {*read}  # a norm is on every device
    assert read.count(1 / 8) == 8 * 9


# Loads a model with little memory to spare.
LIMITED = """
import resource, sys
import jax, jax.numpy as jnp
from spsjax import loading, sharding

def private():
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmData"))
    return int(line.split()[1]) * 1024

small, large, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
mesh = sharding.mesh(1, 8)
loading.load(small, mesh, "bfloat16")  # warms up what takes memory once
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (private() + limit, before[1]))
model = loading.load(large, mesh, "bfloat16")
resource.setrlimit(resource.RLIMIT_DATA, before)
sums = [float(leaf.astype(jnp.float32).sum()) for leaf in jax.tree.leaves(model.params)]
print(sum(sums), sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone limits and reports private memory")
def test_load_with_little_memory_beside_the_model(tmp_path):
    """Half of a float32 file is the size of the bfloat16 model. A quarter of the file is left."""
    expected = {}
    for name, width in (("small", 64), ("large", 1024)):
        config = tiny_config(8192, num_layers=4, d_model=width, d_ff=4 * width, head_dim=width // 8)
        shapes = transformer.param_shapes(config)
        params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, np.float32), shapes)
        hf_weights.save(tmp_path / name, config, params, "float32")
        expected[name] = 0.5 * sum(leaf.size for leaf in jax.tree.leaves(params))
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    limit = int(0.75 * size)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "small", tmp_path / "large", str(limit)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    total, held = map(float, done.stdout.split())
    assert total == expected["large"] and size > limit > held


def test_every_parameter_has_its_own_tensor_name():
    config = tiny_config(24, num_layers=3)
    shapes = transformer.param_shapes(config)
    paths = [
        tuple(entry.key for entry in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    names = {families.locate("llama", config, path).names for path in paths}
    assert len(names) == len(paths) == 3 + 9 * 3
