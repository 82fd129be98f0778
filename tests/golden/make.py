"""Golden model folders: one tiny random model per family, saved by transformers.

pip install -e '.[parity]' && python tests/golden/make.py

Each folder has `expected.npz` with tokens, the float32 logits of transformers, and its greedy text.
"""

import pathlib

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
GEMMA = {"head_dim": 6, "query_pre_attn_scalar": 9, **WINDOW}
# By folder: class of the config, changed fields, and type on disk.
FAMILIES = {
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
        "float32",
    ),
    "llama2": (transformers.LlamaConfig, {"num_key_value_heads": 4}, "float16"),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}, "bfloat16"),
    "mistral": (transformers.MistralConfig, WINDOW, "bfloat16"),
    "multi_query": (transformers.MistralConfig, {"num_key_value_heads": 1}, "bfloat16"),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}, "bfloat16"),
    "qwen2_windows": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
        "bfloat16",
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 6}, "bfloat16"),
    "gemma": (transformers.GemmaConfig, {"head_dim": 6}, "bfloat16"),
    "gemma2": (
        transformers.Gemma2Config,
        {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0, **GEMMA},
        "bfloat16",
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            **GEMMA,
        },
        "bfloat16",
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "bfloat16",
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "head_dim": 6, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
        "bfloat16",
    ),
}  # fmt: skip


def model(name: str) -> transformers.PreTrainedModel:
    """Returns the random model of a folder in float32, rounded to the type on disk."""
    kind, changes, dtype = FAMILIES[name]
    torch.manual_seed(sorted(FAMILIES).index(name))
    shape = TOKENS if kind is transformers.GPT2Config else SHAPE
    made = transformers.AutoModelForCausalLM.from_config(kind(**{**shape, **changes}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # norms and biases are initialized to constants
                parameter.add_(0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(getattr(torch, dtype)))
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
    for name, (_, _, dtype) in FAMILIES.items():
        made = model(name)
        arrays = expected(made)
        made.to(getattr(torch, dtype)).save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(HERE / name / "expected.npz", **arrays)
        size = sum(path.stat().st_size for path in (HERE / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
