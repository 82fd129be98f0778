"""Llama 2 7B, 6.7B parameters (Touvron et al. 2023, arXiv 2307.09288)."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The fields of `spsjax.models.transformer.Config`."""
    return ml_collections.ConfigDict(
        {
            "vocab_size": 32_000,
            "d_model": 4096,
            "d_ff": 11_008,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 32,
            "head_dim": 128,
            "max_positions": 4096,
            "rope_theta": 10_000.0,
            "tie_embeddings": False,
        }
    )
