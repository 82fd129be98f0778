"""Comparisons with transformers itself, which the extra `parity` installs.

`families_test` compares the logits of every family, in folders of both.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

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
    # The default width of this family is no multiple of its default number of heads.
    more = {"head_dim": 128} if family == "glm4_moe" else {}
    kind(pad_token_id=None, **more).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw |= {"rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2}
    path.write_text(json.dumps(raw))
    complete = config_json.read(tmp_path)
    sizes = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads")
    kept = {keys.get(field) for field in (*sizes, "max_positions", "experts_per_token")}
    kept |= {
        *more,
        "model_type",
        "bos_token_id",
        "eos_token_id",
        "num_experts",
        "num_local_experts",
    }
    if family in ("llama", "qwen2", "mistral", "mixtral"):  # a derived value, not a default
        kept |= {"head_dim"}
    path.write_text(json.dumps({key: raw[key] for key in raw if key in kept}))
    assert config_json.read(tmp_path) == complete


LISTS = {"short_factor": [1.0, 1.25, 2.0, 3.0], "long_factor": [1.0, 2.0, 8.0, 32.0]}
STRETCHED = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "original_max_position_embeddings": 16} | LISTS,
]


@pytest.mark.parametrize("new_style", [False, True])
@pytest.mark.parametrize("scaling", STRETCHED, ids=lambda scaling: scaling["rope_type"])
def test_stretched_positions_give_the_logits_of_transformers(
    transformers, tmp_path, scaling, new_style
):
    """Around the original context of 16, decoded token by token; longrope ends there."""
    import torch

    context = 64 if scaling["rope_type"] == "longrope" else 16
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=24, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            max_position_embeddings=context, initializer_range=0.3,
            rope_parameters=scaling | {"rope_theta": 1e4},
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    if not new_style:
        path = tmp_path / "config.json"
        raw = json.loads(path.read_text()) | {"rope_parameters": None}
        older = {key: value for key, value in scaling.items() if key != "rope_type"}
        raw |= {"rope_theta": 1e4, "rope_scaling": older | {"type": scaling["rope_type"]}}
        path.write_text(json.dumps(raw))
    config = hf_weights.read_config(tmp_path)
    longest = 16 if scaling["rope_type"] == "longrope" else 64
    assert config.max_positions == longest
    tokens = np.random.default_rng(1).integers(0, 24, (2, min(longest, 24))).astype(np.int32)
    params = hf_weights.read_params(tmp_path, config, jnp.float32)
    ours = train_step.forward(config, params, tokens).logits
    cache, logits = transformers.DynamicCache(config=theirs.config), []
    with torch.no_grad():
        for position in range(tokens.shape[1]):
            now = torch.from_numpy(tokens[:, position : position + 1]).long()
            logits.append(theirs(now, past_key_values=cache).logits[:, 0].numpy())
    np.testing.assert_allclose(ours, np.stack(logits, axis=1), atol=2e-4)
