"""Tests of reading and writing config.json."""

import dataclasses
import json

import jax
import pytest
from helpers.bad_input import one_line
from helpers.golden_folders import GOLDEN, edit_config, golden_config
from helpers.models import tiny_config
from helpers.numpy_models import numpy_spread_params

from spsjax import InputError
from spsjax.models import transformer
from spsjax.models.hf import config_json
from spsjax.models.hf import weights as hf_weights


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
def test_rotary_base_is_read_from_old_and_new_keys(tmp_path, changes):
    config = tiny_config(24, rope_theta=5e5)
    config_json.write(tmp_path, config, "float32")
    edit_config(tmp_path, **changes)
    assert hf_weights.read_config(tmp_path) == config


def test_missing_fields_have_defaults_of_family(tmp_path):
    config = tiny_config(24, num_kv_heads=8, norm_eps=1e-6)
    config_json.write(tmp_path, config, "float32")
    absent = (
        "head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "hidden_act",
    )  # fmt: skip
    edit_config(tmp_path, remove=absent)
    assert hf_weights.read_config(tmp_path) == config


def test_eos_ids_beyond_the_vocabulary_are_left_out_but_not_all(tmp_path):
    config_json.write(tmp_path, tiny_config(24), "float32")
    edit_config(tmp_path, eos_token_id=[2, 99_999])
    assert hf_weights.read_config(tmp_path).eos_ids == (2,)
    for eos in (99_999, [99_999]):
        edit_config(tmp_path, eos_token_id=eos)
        with pytest.raises(InputError, match="eos_token_id: expected an id in the vocabulary"):
            hf_weights.read_config(tmp_path)


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (2, (2,)), ([2, 5], (2, 5)), (0, (0,))])
def test_eos_ids_are_none_one_or_many(tmp_path, eos, expected):
    config_json.write(tmp_path, tiny_config(24), "float32")
    edit_config(tmp_path, eos_token_id=eos)
    assert hf_weights.read_config(tmp_path).eos_ids == expected


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama2", {"sliding_window": 4, "use_sliding_window": True, "query_pre_attn_scalar": 3}),
        ("llama2", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 3.0}),
        ("mistral", {"use_sliding_window": False, "max_window_layers": 1}),
        ("qwen2_windows", {"sliding_window_pattern": 2, "layer_types": None}),
        ("gemma2", {"sliding_window_pattern": 3, "layer_types": None}),
        ("gemma3", {"attn_logit_softcapping": 3.0}),
    ],
)
def test_features_of_other_families_are_ignored(tmp_path, name, changes):
    assert golden_config(name, tmp_path, **changes) == config_json.read(GOLDEN / name)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("llama2", {"rope_scaling": LINEAR}, {"rope_scaling": ("linear", 2.0)}),
        (  # the older key takes precedence
            "llama2",
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 7.0}},
            {"rope_scaling": ("linear", 2.0), "rope_theta": 10_000.0},
        ),
        (  # the outer key takes precedence
            "llama3",
            {"original_max_position_embeddings": 32},
            {"rope_scaling": ("llama3", 8.0, 1.0, 4.0, 32.0)},
        ),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": LINEAR},
            {"rope_scaling": ("linear", 2.0), "rope_theta": 1e6, "rope_theta_local": 1e4},
        ),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}},
            {"rope_scaling": (), "rope_theta": 1e6, "rope_theta_local": 5.0},
        ),
        ("gemma3", {"layer_types": None}, {"windows": (8, 8, 8, 8, 8, 0)}),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}, {"windows": (8, 0)}),
        ("gemma2", {"layer_types": None}, {"windows": (8, 0)}),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, {"windows": (0, 8)}),
        ("gemma", {"hidden_act": "gelu"}, {}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, {}),
        (
            "deepseek_v3",
            {"num_experts_per_tok": None, "n_group": 1, "topk_group": 1},
            {"experts_per_token": 8, "expert_groups": 1, "groups_per_token": 1},
        ),
        ("glm4_moe", {"num_experts_per_tok": None}, {"experts_per_token": 8}),
        (
            "glm4_moe_lite",
            {"num_experts_per_tok": None, "q_lora_rank": 8},
            {"experts_per_token": 4, "query_rank": 8},
        ),
    ],
)
def test_spellings_of_older_and_newer_files(tmp_path, name, changes, fields):
    expected = dataclasses.replace(config_json.read(GOLDEN / name), **fields)
    assert golden_config(name, tmp_path, **changes) == expected


LONG = {"num_hidden_layers": 2**31 - 1, "layer_types": None}
TOO_LONG = "num_hidden_layers: expected at most 1024 layers, found 2147483647"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"n_embd": 12}, "n_embd: expected an even multiple of n_head=4, found 12"),
        (
            "llama2",
            {"num_key_value_heads": 3},
            "num_attention_heads: expected a multiple of num_key_value_heads=3, found 4",
        ),
        (  # whose layers `read` compares
            "gemma4",
            {"num_attention_heads": 3},
            "num_attention_heads: expected a multiple of num_key_value_heads=2, found 3",
        ),
        (
            "mixtral",
            {"num_experts_per_tok": 7},
            "num_experts_per_tok: expected 1 to num_local_experts=4, found 7",
        ),
        (
            "glm4_moe",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok: expected at most n_routed_experts=8, found 9",
        ),
        (
            "deepseek_v3",
            {"qk_rope_head_dim": 3},
            "qk_rope_head_dim: expected an even integer in [2, 2**31), found 3",
        ),
        (
            "gemma4",
            {"global_head_dim": 7, "per_layer_config": None},
            "global_head_dim: expected an even integer in [2, 2**31), found 7",
        ),
        (
            "gemma4_keys",
            {"per_layer_config": {"1": {"num_key_value_heads": 3}}},
            "per_layer_config.1.num_key_value_heads: expected a divisor of num_attention_heads=4",
        ),
        (
            "gemma4_mixture",
            {"top_k_experts": 7},
            "top_k_experts: expected at most num_experts=4, found 7",
        ),
        ("gemma2", LONG, TOO_LONG),
        ("gemma4", LONG | {"sliding_window": None}, TOO_LONG),
        ("deepseek_v3", LONG, TOO_LONG),
        ("qwen3_next", LONG, TOO_LONG),
        ("qwen3_5", LONG, TOO_LONG),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_their_key(tmp_path, name, changes, message):
    with one_line(f"config.json: {message}"):
        golden_config(name, tmp_path, **changes)


def test_key_of_a_nested_config_is_named_with_its_parent(tmp_path):
    raw = json.loads((GOLDEN / "qwen3_5_moe" / "config.json").read_text())
    nested = {"model_type": "qwen3_5_moe", "text_config": raw | {"num_experts_per_tok": 7}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    with one_line("config.json: text_config.num_experts_per_tok: expected 1 to num_experts=4"):
        config_json.read(tmp_path)


def test_sizes_of_heads_that_are_not_rotated_may_be_odd(tmp_path):
    delta = golden_config("qwen3_next", tmp_path, linear_key_head_dim=3)
    latent = golden_config("deepseek_v3", tmp_path, qk_nope_head_dim=3)
    assert (delta.layer(0).head_dim, latent.head_dim, latent.rotary_dim) == (3, 7, 4)
    for config in (delta, latent):
        config_json.write(tmp_path, config, "float32")
        assert config_json.read(tmp_path) == config


def test_unknown_layer_types_are_refused(tmp_path):
    with one_line("layer_types", "sliding_attention"):
        golden_config("gemma2", tmp_path, layer_types=["full_attention", []])


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemma_without_windows_is_written_with_their_size(tmp_path, name):
    """transformers needs a number there, whether or not a layer has a window."""
    layers = config_json.read(GOLDEN / name).num_layers
    config = golden_config(name, tmp_path, layer_types=["full_attention"] * layers)
    assert config.windows == ()
    config_json.write(tmp_path, config, "float32")
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 4096
    assert config_json.read(tmp_path) == config


def test_shape_that_layout_cannot_express_is_refused(tmp_path):
    config = dataclasses.replace(config_json.read(GOLDEN / "mixtral"), windows=(8, 0))
    with one_line("model", "mixtral"):
        hf_weights.save(tmp_path, config, numpy_spread_params(config, 0))
    assert not list(tmp_path.iterdir())


def test_save_removes_generation_config_of_another_model(tmp_path):
    config = config_json.read(GOLDEN / "llama2")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    hf_weights.save(tmp_path, config, numpy_spread_params(config, 0))
    assert config_json.read(tmp_path).eos_ids == config.eos_ids == (2,)


@pytest.mark.parametrize(
    "name", ["llama2", "gpt2", "mixtral", "gemma2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"]
)
def test_number_of_weights_is_that_of_the_matrices(name, tmp_path):
    config = golden_config(name, tmp_path)
    shapes = jax.tree_util.tree_leaves_with_path(transformer.param_shapes(config))
    names = ("kernel", "experts_", "embedding")
    counted = sum(
        leaf.size
        for path, leaf in shapes
        if path[-1].key.startswith(names)
        and path[0].key != "position_embed"
        and "router" not in [entry.key for entry in path]
    )
    assert config.num_weights == counted
