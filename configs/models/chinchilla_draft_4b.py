"""The draft of Chen et al. 2023 (arXiv 2302.01318), Table 2: 4.1B parameters.

python scripts/compile_tpu.py --topology=v5p:2x2x4 --config=configs/experiments/chinchilla_70b.py

It has a tenth of the target's layers and three quarters of its width, because on many chips each
layer adds collectives. Other choices are those of `chinchilla_70b.py`. There are no public weights.
Hardware: meant for the target's 16 chips.
"""

import ml_collections

from spsjax.models.config import sizes


def get_config() -> ml_collections.ConfigDict:
    """Returns the fields of `spsjax.models.config.Config`."""
    return ml_collections.ConfigDict(
        {
            "vocab_size": 32_000,
            "max_positions": 2048,
            "positions": "relative",
            "ffn": "gelu",
            **sizes(8, 6144, 4 * 6144, 48, 48),
        }
    )
