"""SmolLM2 (Ben Allal et al. 2025, arXiv 2502.02737): `smollm2:135m`, `:360m` and `:1.7b`.

`smollm2:draft` is a draft of four layers, as wide as the smallest. There are no weights of it.

python scripts/compile.py --topology=H100 --drafter=eagle3 --config.target=smollm2:135m

Hardware: any; the command needs a CPU and the extra `gpu-compiler`. docs/benchmarks/gpu.md has its
figures.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

SIZES = {
    "135m": sizes(30, 576, 1536, 9, 3),
    "360m": sizes(32, 960, 2560, 15, 5),
    "draft": sizes(4, 576, 1536, 9, 3),
    "1.7b": sizes(24, 2048, 8192, 32, 32) | {"rope_theta": 130_000.0},
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(
    SIZES, vocab_size=49_152, max_positions=8192, rope_theta=100_000.0, tie_embeddings=True
)
