r"""Qwen2.5 (Yang et al. 2024, arXiv 2412.15115) and Qwen3 (2025, arXiv 2505.09388): `qwen:2.5-7b`.

python scripts/compile.py --topology=v5e:2x4 --config=configs/experiments/chinchilla_70b.py \
    --config.target=qwen:3-8b --config.draft=qwen:3-0.6b

Sizes: 2.5-0.5b, -1.5b, -3b, -7b, -14b, -32b and -72b; 3-0.6b, -1.7b, -4b, -8b, -14b, -32b and
-30b-a3b; next-80b-a3b; 3.5-9b and -35b-a3b. Embedding and head have more rows than the tokenizer
has tokens, and their number depends on the size.
Hardware: any with memory for the weights; the command needs a CPU and libtpu. Not measured.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

_TIED = {"tie_embeddings": True}
_LARGE = {"padded_vocab_size": 152_064}
_BOTH = {"padded_vocab_size": 151_936, "tie_embeddings": False}
_SECOND = _BOTH | {"vocab_size": 151_665, "max_positions": 32_768, "biases": "qkv"}
_THIRD = _BOTH | {"vocab_size": 151_669, "max_positions": 40_960, "qk_norm": True}
_EXPERTS = {"num_experts": 128, "experts_per_token": 8}


def _hybrid(**more) -> dict:
    """Returns the fields of gated delta nets in three of four layers, and of the model's others."""
    delta = {"mixer": "delta", "num_heads": 32, "num_kv_heads": 16, "head_dim": 128}
    delta |= {"value_dim": 128, "delta_taps": 4}
    delta |= {"attention_gate": False, "qk_norm": False, "rotary_dim": 0}
    return {
        "changes": (tuple(delta.items()),) * 3 + ((),),
        "max_positions": 262_144,
        "rope_theta": 1e7,
        "rotary_dim": 64,
        "norm_offset": 1.0,
        "attention_gate": True,
        "qk_norm": True,
        "tie_embeddings": False,
        **more,
    }


def _shared(count: int, chosen: int, **more) -> dict:
    """Returns the fields of a mixture with an expert that all tokens use."""
    experts = {"num_experts": count, "experts_per_token": chosen, "shared_d_ff": 512}
    return _hybrid(**experts, shared_gate=True, **more)


_NEXT = {"vocab_size": 151_669, "padded_vocab_size": 151_936}
_MIXTURE = {"layout": "qwen3_5_moe_text", "vocab_size": 248_320}
SIZES = {
    "2.5-0.5b": _SECOND | sizes(24, 896, 4864, 14, 2, **_TIED),
    "2.5-1.5b": _SECOND | sizes(28, 1536, 8960, 12, 2, **_TIED),
    "2.5-3b": _SECOND | sizes(36, 2048, 11_008, 16, 2, **_TIED),
    "2.5-7b": _SECOND | sizes(28, 3584, 18_944, 28, 4, **_LARGE),
    "2.5-14b": _SECOND | sizes(48, 5120, 13_824, 40, 8, **_LARGE),
    "2.5-32b": _SECOND | sizes(64, 5120, 27_648, 40, 8, **_LARGE),
    "2.5-72b": _SECOND | sizes(80, 8192, 29_568, 64, 8, **_LARGE),
    "3-0.6b": _THIRD | sizes(28, 1024, 3072, 16, 8, head_dim=128, **_TIED),
    "3-1.7b": _THIRD | sizes(28, 2048, 6144, 16, 8, head_dim=128, **_TIED),
    "3-4b": _THIRD | sizes(36, 2560, 9728, 32, 8, head_dim=128, **_TIED),
    "3-8b": _THIRD | sizes(36, 4096, 12_288, 32, 8),
    "3-14b": _THIRD | sizes(40, 5120, 17_408, 40, 8),
    "3-32b": _THIRD | sizes(64, 5120, 25_600, 64, 8, head_dim=128),
    "3-30b-a3b": _THIRD | sizes(48, 2048, 768, 32, 4, head_dim=128, **_EXPERTS),
    "next-80b-a3b": sizes(48, 2048, 512, 16, 2, head_dim=256, **_shared(512, 10, **_NEXT)),
    "3.5-9b": sizes(32, 4096, 12_288, 16, 4, head_dim=256, **_hybrid(vocab_size=248_320)),
    "3.5-35b-a3b": sizes(40, 2048, 512, 16, 2, head_dim=256, **_shared(256, 8, **_MIXTURE)),
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(SIZES, rope_theta=1e6, norm_eps=1e-6)
