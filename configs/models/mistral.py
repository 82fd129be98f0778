"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825) and Mixtral 8x7B (2024, arXiv 2401.04088).

`mistral:7b` is the paper's, with windows of 4,096 tokens; `mistral:7b-v0.3` has none of them.
"""

import ml_collections

SIZES = {
    "7b": {"windows": (4096,)},
    "7b-v0.3": {"vocab_size": 32_768, "rope_theta": 1e6},
    "8x7b": {"num_experts": 8, "experts_per_token": 2, "rope_theta": 1e6},
}


def get_config(size: str) -> ml_collections.ConfigDict:
    """The fields of `spsjax.models.transformer.Config`."""
    return ml_collections.ConfigDict(
        {
            "vocab_size": 32_000,
            "d_model": 4096,
            "d_ff": 14_336,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "max_positions": 32_768,
            "rope_theta": 10_000.0,
            "tie_embeddings": False,
            **SIZES[size],
        }
    )
