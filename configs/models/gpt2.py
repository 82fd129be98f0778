"""GPT-2 (Radford et al. 2019): `gpt2:small`, `gpt2:medium`, `gpt2:large` and `gpt2:xl`.

python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --random

Hardware: XL with small as its draft needs 7 GB of memory in float32. On two CPU cores a pass of XL
takes 299 ms and a draft step of small 23 ms (docs/archive/0.1_epyc_zen4_float32.md).
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

SIZES = {
    "small": sizes(12, 768, 3072, 12, 12),
    "medium": sizes(24, 1024, 4096, 16, 16),
    "large": sizes(36, 1280, 5120, 20, 20),
    "xl": sizes(48, 1600, 6400, 25, 25),
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(
    SIZES,
    vocab_size=50_257,
    max_positions=1024,
    positions="learned",
    ffn="gelu",
    norm="layer",
    biases="all",
)
