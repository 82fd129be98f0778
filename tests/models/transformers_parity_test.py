"""Comparisons with transformers itself, which the extra `parity` installs."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import spread_params, tiny_config

from spsjax.models.hf import config_json, families
from spsjax.models.hf import weights as hf_weights
from spsjax.training import step as train_step


@pytest.fixture(scope="module")
def transformers():
    """The module `transformers`."""
    pytest.importorskip("torch", reason="needs the extra: pip install -e '.[parity]'")
    return pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[parity]'")


@pytest.mark.parametrize("family", sorted({*families.FAMILIES} - {"chinchilla"}))
def test_family_defaults_equal_those_of_transformers(transformers, tmp_path, family):
    """A config.json with sizes alone is read like one in which transformers wrote every field."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    keys = families.FAMILIES[family].keys
    kind(pad_token_id=None).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw |= {"rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2}
    path.write_text(json.dumps(raw))
    complete = config_json.read(tmp_path)
    sizes = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads")
    kept = {keys.get(field) for field in (*sizes, "max_positions", "experts_per_token")}
    kept |= {"model_type", "bos_token_id", "eos_token_id", "num_experts", "num_local_experts"}
    if family in ("llama", "qwen2", "mistral", "mixtral"):  # a derived value, not a default
        kept |= {"head_dim"}
    path.write_text(json.dumps({key: raw[key] for key in raw if key in kept}))
    assert config_json.read(tmp_path) == complete


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
def test_folder_of_transformers_gives_its_logits_here(transformers, tmp_path, changes):
    config = tiny_config(24, **changes)
    torch_model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
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
    read = hf_weights.read_config(tmp_path)
    assert dataclasses.replace(read, bos_id=None, eos_ids=()) == config
    params = hf_weights.read_params(tmp_path, read, jnp.float32)
    ours = train_step.forward(read, params, TOKENS).logits
    assert np.abs(ours - their_logits(torch_model)).max() < 1e-4


@pytest.mark.parametrize("changes", SHAPES)
def test_folder_of_spsjax_gives_its_logits_in_transformers(transformers, tmp_path, changes):
    config = tiny_config(24, bos_id=1, eos_ids=(2, 3), **changes)
    params = spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    ours = train_step.forward(config, params, TOKENS).logits
    assert np.abs(ours - their_logits(model)).max() < 1e-4 * jnp.abs(ours).max()
    assert model.config.eos_token_id == [2, 3]
