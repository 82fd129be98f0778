"""The draft of Chen et al. 2023 (arXiv 2302.01318), Table 2: 4.1B parameters, as wide as the mesh
of its 70B target wants and a tenth as deep.

Of the same family as `chinchilla_70b.py`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The fields of `spsjax.models.transformer.Config`."""
    return ml_collections.ConfigDict(
        {
            "vocab_size": 32_000,
            "d_model": 6144,
            "d_ff": 4 * 6144,
            "num_layers": 8,
            "num_heads": 48,
            "num_kv_heads": 48,
            "head_dim": 128,
            "max_positions": 2048,
            "positions": "relative",
            "ffn": "gelu",
        }
    )
