"""Comparisons of odd members of DeepSeek's and GLM's families with transformers (extra `parity`).

`families_test` compares common ones with recorded logits.
"""

import numpy as np
import pytest

from spsjax import loading
from spsjax.models.hf import weights as hf_weights
from spsjax.training import step as train_step

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
}  # fmt: skip
CASES = {
    "DeepseekV3": {
        "no compressed queries": {"q_lora_rank": None},
        "groups, no normalised weights": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
        "two shared experts, no dense layer": {"n_shared_experts": 2, "first_k_dense_replace": 0},
        "no shared expert": {"n_shared_experts": 0},
        "biases, halves": {"attention_bias": True, "rope_interleave": False},
        "yarn": {"rope_parameters": YARN},
        "yarn of scores": {"rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}},
    },
    "Glm4Moe": {
        "plain": {"head_dim": 8, "num_key_value_heads": 2},
        "biases, norms of heads": {"head_dim": 8, "attention_bias": True, "use_qk_norm": True},
        "a quarter rotated": {
            "head_dim": 8, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default",
            "partial_rotary_factor": 0.25},
        },
        "no shared expert, groups": {
            "head_dim": 8, "n_shared_experts": 0, "n_group": 2, "topk_group": 1,
        },
    },
    "Glm4MoeLite": {
        "dense layers": {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None},
        "scaled": {"routed_scaling_factor": 1.8, "n_shared_experts": 2},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, cases in CASES.items() for name in cases]
)
def test_logits_are_those_of_transformers_and_folders_are_read_by_it(tmp_path, kind, name):
    torch = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[parity]'")
    transformers = pytest.importorskip("transformers", reason="needs the extra parity")
    fields = SIZES | (LATENT if kind != "Glm4Moe" else {}) | CASES[kind][name]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{kind}Config")(**fields)
    ).eval()
    with torch.no_grad():
        for array in [*theirs.parameters(), *theirs.buffers()]:
            if array.ndim == 1 and len(array) > 2:  # norms and biases, but no frequencies
                array.add_(0.3 * torch.randn_like(array))
    theirs.save_pretrained(tmp_path / "theirs")
    model = loading.load(tmp_path / "theirs", dtype="float32")
    tokens = np.random.default_rng(0).integers(3, 40, (2, 24)).astype(np.int32)
    ours = train_step.forward(model.config, model.params, tokens).logits
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    hf_weights.save(tmp_path / "ours", model.config, model.params, "float32")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        again = back(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(again, expected, atol=1e-4)
