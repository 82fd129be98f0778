"""Chinchilla, 70.1B parameters: the target of Chen et al. 2023 (arXiv 2302.01318), Table 2.

Width, heads and layers are Table 2's. Relative positions and RMSNorm are Gopher's (Rae et al. 2021,
arXiv 2112.11446); a feed-forward layer of 4 d_model is nowhere stated, but only it gives the count.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The fields of `spsjax.models.transformer.Config`."""
    return ml_collections.ConfigDict(
        {
            "vocab_size": 32_000,
            "d_model": 8192,
            "d_ff": 4 * 8192,
            "num_layers": 80,
            "num_heads": 64,
            "num_kv_heads": 64,
            "head_dim": 128,
            "max_positions": 2048,
            "positions": "relative",
            "ffn": "gelu",
        }
    )
