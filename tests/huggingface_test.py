"""Model folders: what is saved is what is loaded, and other tools read and write the same."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from conftest import spread_params, tiny_config

from spsjax import train
from spsjax.models import huggingface, transformer


def equal(one, other) -> bool:
    """Whether two pytrees of arrays are the same, types included."""
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(leaves, others)
    )


def edit_config(folder, remove=(), **changes):
    """Changes fields of a saved config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: raw[name] for name in raw if name not in remove}))


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
def test_a_saved_model_loads_as_it_was(tmp_path, tie, dtype):
    config = tiny_config(24, num_layers=2, tie_embeddings=tie, bos_id=1, eos_ids=(2,))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), spread_params(config, 0))
    huggingface.save(tmp_path, config, params, dtype)
    assert huggingface.read_config(tmp_path) == config
    assert equal(huggingface.read_params(tmp_path, config, dtype), params)
    assert ("lm_head.weight" in safetensors.numpy.load_file(tmp_path / "model.safetensors")) != tie
    assert not list(tmp_path.glob("*.partial"))


def test_bfloat16_weights_are_widened_exactly(tmp_path):
    config = tiny_config(24)
    params = spread_params(config, 0)
    huggingface.save(tmp_path, config, params)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert equal(huggingface.read_params(tmp_path, config, jnp.float32), rounded)


def test_shards_with_an_index_load_like_one_file(tmp_path):
    config = tiny_config(24, num_layers=2)
    params = spread_params(config, 0)
    huggingface.save(tmp_path, config, params, "float32")
    shard(tmp_path, 3)
    assert equal(huggingface.read_params(tmp_path, config, jnp.float32), params)


def test_saving_over_shards_replaces_them(tmp_path):
    config = tiny_config(24)
    huggingface.save(tmp_path, config, spread_params(config, 0), "float32")
    shard(tmp_path, 2)
    params = spread_params(config, 1)
    huggingface.save(tmp_path, config, params, "float32")
    assert equal(huggingface.read_params(tmp_path, config, jnp.float32), params)


def test_kernels_are_stored_with_outputs_first(tmp_path):
    config = tiny_config(24, d_ff=40)
    params = spread_params(config, 0)
    huggingface.save(tmp_path, config, params, "float32")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    kernel = params["layers"][0]["ffn"]["up"]["kernel"]
    assert np.array_equal(stored["model.layers.0.mlp.up_proj.weight"], kernel.T)
    assert np.array_equal(stored["model.embed_tokens.weight"], params["embed"]["embedding"])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 500_000, "rope_scaling": {"type": "default"}},
    ],
)
def test_the_rotary_base_is_found_where_old_and_new_files_have_it(tmp_path, changes):
    config = tiny_config(24, rope_theta=5e5)
    huggingface.write_config(tmp_path, config, "float32")
    edit_config(tmp_path, **changes)
    assert huggingface.read_config(tmp_path) == config


def test_absent_fields_have_the_defaults_of_the_family(tmp_path):
    config = tiny_config(24, num_kv_heads=8, norm_eps=1e-6)
    huggingface.write_config(tmp_path, config, "float32")
    absent = (
        "head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "hidden_act",
    )  # fmt: skip
    edit_config(tmp_path, remove=absent)
    assert huggingface.read_config(tmp_path) == config


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (2, (2,)), ([2, 5], (2, 5)), (0, (0,))])
def test_end_ids_are_none_one_or_many(tmp_path, eos, expected):
    huggingface.write_config(tmp_path, tiny_config(24), "float32")
    edit_config(tmp_path, eos_token_id=eos)
    assert huggingface.read_config(tmp_path).eos_ids == expected


def test_stored_rotary_frequencies_and_a_tied_head_are_ignored(tmp_path):
    config = tiny_config(24, tie_embeddings=True)
    params = spread_params(config, 0)
    huggingface.save(tmp_path, config, params, "float32")
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file(tensors, path)
    assert equal(huggingface.read_params(tmp_path, config, jnp.float32), params)


# Against transformers itself, where the extra `parity` is installed.


@pytest.fixture(scope="module")
def other():
    """The module `transformers`."""
    pytest.importorskip("torch", reason="needs the extra: pip install -e '.[parity]'")
    return pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[parity]'")


TOKENS = np.random.default_rng(0).integers(0, 24, (2, 19)).astype(np.int32)
SHAPES = [
    {"tie_embeddings": True},
    {"tie_embeddings": False, "num_kv_heads": 8, "head_dim": 6, "rope_theta": 5e3},
    {"tie_embeddings": False, "num_layers": 2, "norm_eps": 1e-3, "d_ff": 40},
]


def their_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.numpy()


@pytest.mark.parametrize("changes", SHAPES)
def test_a_folder_of_transformers_gives_its_logits_here(other, tmp_path, changes):
    config = tiny_config(24, **changes)
    torch_model = other.LlamaForCausalLM(
        other.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
            tie_word_embeddings=config.tie_embeddings,
            initializer_range=0.3,
        )
    )
    torch_model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    read = huggingface.read_config(tmp_path)
    assert dataclasses.replace(read, bos_id=None, eos_ids=()) == config
    params = huggingface.read_params(tmp_path, read, jnp.float32)
    ours = train.forward(read, params, TOKENS).logits
    assert np.abs(ours - their_logits(torch_model)).max() < 1e-4


@pytest.mark.parametrize("changes", SHAPES)
def test_a_folder_of_ours_gives_our_logits_in_transformers(other, tmp_path, changes):
    config = tiny_config(24, bos_id=1, eos_ids=(2, 3), **changes)
    params = spread_params(config, 0)
    huggingface.save(tmp_path, config, params, "float32")
    model = other.LlamaForCausalLM.from_pretrained(tmp_path)
    ours = train.forward(config, params, TOKENS).logits
    assert np.abs(ours - their_logits(model)).max() < 1e-4 * jnp.abs(ours).max()
    assert model.config.eos_token_id == [2, 3]


def test_every_parameter_has_a_tensor_name_of_its_own():
    config = tiny_config(24, num_layers=3)
    shapes = transformer.param_shapes(config)
    paths = [
        tuple(entry.key for entry in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    assert len({huggingface.tensor_name(path) for path in paths}) == len(paths) == 3 + 9 * 3
