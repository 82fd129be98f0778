"""GPT-2 (Radford et al. 2019): `gpt2:small`, `gpt2:medium`, `gpt2:large` and `gpt2:xl`.

python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --random

Hardware: XL with small as its draft needs 7 GB of memory in float32. On two CPU cores a pass of XL
takes 299 ms and a draft step of small 23 ms (docs/models.md).
"""

import ml_collections

SIZES = {
    "small": {"num_layers": 12, "d_model": 768},
    "medium": {"num_layers": 24, "d_model": 1024},
    "large": {"num_layers": 36, "d_model": 1280},
    "xl": {"num_layers": 48, "d_model": 1600},
}


def get_config(size: str) -> ml_collections.ConfigDict:
    """Returns the fields of `spsjax.models.config.Config`."""
    shape = SIZES[size]
    return ml_collections.ConfigDict(
        {
            "vocab_size": 50_257,
            "d_ff": 4 * shape["d_model"],
            "num_heads": shape["d_model"] // 64,
            "num_kv_heads": shape["d_model"] // 64,
            "head_dim": 64,
            "max_positions": 1024,
            "positions": "learned",
            "ffn": "gelu",
            "norm": "layer",
            "biases": "all",
            **shape,
        }
    )
