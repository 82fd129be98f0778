"""Golden model folders: one tiny random model per family, saved by transformers.

pip install -e '.[parity]' && python tests/golden/make.py [FOLDER ...]

Each folder has `expected.npz` with tokens, the float32 logits of transformers, and its greedy text.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
VOCAB, CONTEXT, NEW = 40, 64, 16
TOKENS = {
    "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.4,
}  # fmt: skip
SHAPE = TOKENS | {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
WINDOW = {"sliding_window": 8}
# Its scores are not divided by the root of the heads' size: larger weights would amplify rounding.
GEMMA4 = {"initializer_range": 0.2, "head_dim": 6, **WINDOW}
GEMMA = {"head_dim": 6, "query_pre_attn_scalar": 9, **WINDOW}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
KINDS = {"s": "sliding_attention", "f": "full_attention"}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SPARSE = {
    "num_hidden_layers": 3, "moe_intermediate_size": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "q_lora_rank": 12, **SPARSE,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "head_dim": 8, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 6,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rms_norm_eps": 0.01,  # or norms of small outputs would magnify rounding
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
SHARED = {
    "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
DTYPES = {"gpt2": "float32", "llama2": "float16"}  # on disk; of the others: bfloat16
# By folder: class of the config, and changed fields.
FAMILIES = {
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", WINDOW),
    "multi_query": ("Mistral", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "qwen3": ("Qwen3", {"head_dim": 6}),
    "gemma": ("Gemma", {"head_dim": 6}),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0, **GEMMA}),
    "gemma3": ("Gemma3Text", {"num_hidden_layers": 7, "rope_parameters": ROPES, **GEMMA}),
    "gemma4": (
        "Gemma4Text",
        {
            "num_hidden_layers": 6, "layer_types": [*"sfssff"], "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True, "global_head_dim": 8,
            "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB + 8,
            "final_logit_softcapping": 6.0, **GEMMA4,
        },
    ),
    "gemma4_keys": (
        "Gemma4Text",
        {
            "num_hidden_layers": 3, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "global_head_dim": 8, "hidden_size_per_layer_input": 0, **GEMMA4,
        },
    ),
    "gemma4_mixture": (
        "Gemma4Text",
        {
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 12, "global_head_dim": 6,
            "hidden_size_per_layer_input": 0, **GEMMA4,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 6, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT
        | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "glm4_moe": ("Glm4Moe", {"head_dim": 8, "use_qk_norm": True, "attention_bias": True, **SPARSE}),
    "qwen3_next": ("Qwen3Next", DELTA | SHARED),
    "qwen3_5": (
        "Qwen3_5Text",
        DELTA
        | {
            "num_hidden_layers": 3, "linear_num_key_heads": 4, "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "qwen3_5_moe": ("Qwen3_5MoeText", DELTA | SHARED | {"linear_conv_kernel_dim": 4}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | {"q_lora_rank": None, "norm_topk_prob": False}),
}  # fmt: skip


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, DTYPES.get(name, "bfloat16"))


def model(name: str) -> transformers.PreTrainedModel:
    """Returns the random model of a folder in float32, rounded to the type on disk."""
    kind, changes = FAMILIES[name]
    torch.manual_seed(sorted(FAMILIES).index(name))
    fields = {**(TOKENS if kind == "GPT2" else SHAPE), **changes}
    if "layer_types" in fields:
        fields["layer_types"] = [KINDS[kind] for kind in fields["layer_types"]]
    config = getattr(transformers, f"{kind}Config")(**fields)
    made = transformers.AutoModelForCausalLM.from_config(config)
    biases = [array for name, array in made.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for parameter in [*made.parameters(), *biases]:
            if parameter.ndim == 1:  # norms and biases are initialized to constants
                parameter.add_(0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(dtype_of(name)))
        for key, buffer in made.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_((1 + 0.3 * torch.randn_like(buffer)).to(dtype_of(name)))
    return made.float().eval()


def expected(made: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """Returns the logits of two rows of tokens, and the greedy text after the first row."""
    tokens = np.random.default_rng(0).integers(3, VOCAB, (2, 24))
    with torch.no_grad():
        inputs = torch.from_numpy(tokens)
        logits = made(inputs).logits.numpy()
        for _ in range(NEW):
            best = made(inputs[:1]).logits[:, -1:].argmax(-1)
            inputs = torch.cat([inputs[:1], best], dim=1)
    greedy = inputs[0, tokens.shape[1] :].numpy()
    return {"tokens": tokens.astype(np.int32), "logits": logits, "greedy": greedy}


def main():
    for name in sys.argv[1:] or FAMILIES:
        made = model(name)
        arrays = expected(made)
        made.to(dtype_of(name)).save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(HERE / name / "expected.npz", **arrays)
        size = sum(path.stat().st_size for path in (HERE / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
