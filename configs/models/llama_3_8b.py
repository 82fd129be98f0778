"""Llama 3, 8.0B parameters (Grattafiori et al. 2024, arXiv 2407.21783, Table 3)."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The fields of `spsjax.models.transformer.Config`."""
    return ml_collections.ConfigDict(
        {
            "vocab_size": 128_256,
            "d_model": 4096,
            "d_ff": 14_336,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "max_positions": 8192,
            "rope_theta": 500_000.0,
            "tie_embeddings": False,
        }
    )
