r"""Llama 2 (Touvron et al. 2023, arXiv 2307.09288) and Llama 3 to 3.2: `llama:2-7b`.

python scripts/compile.py --topology=v5e:2x4 --config=configs/experiments/chinchilla_70b.py \
    --config.target=llama:3.1-8b --config.draft=llama:3.2-1b

Sizes: 2-7b, 2-13b, 2-70b, 3-8b, 3-70b, 3.1-8b, 3.1-70b, 3.1-405b, 3.2-1b and 3.2-3b. Llama 3 is
described by Grattafiori et al. 2024 (arXiv 2407.21783). Versions 3.1 and 3.2 scale its rotary
frequencies.
Hardware: any with memory for the weights; the command needs a CPU and libtpu. Not measured.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes


def _scaled(factor: float) -> dict:
    scaling = ("llama3", factor, 1.0, 4.0, 8192.0)
    return {"max_positions": 131_072, "rope_scaling": scaling}


_SHAPES = {
    "2-7b": sizes(32, 4096, 11_008, 32, 32),
    "2-13b": sizes(40, 5120, 13_824, 40, 40),
    "2-70b": sizes(80, 8192, 28_672, 64, 8),
    "3-8b": sizes(32, 4096, 14_336, 32, 8),
    "3-70b": sizes(80, 8192, 28_672, 64, 8),
}
_SECOND = {"vocab_size": 32_000, "max_positions": 4096, "rope_theta": 10_000.0}
_THIRD = {"vocab_size": 128_256, "max_positions": 8192, "rope_theta": 500_000.0}
SIZES = {
    **{size: (_SECOND if size[0] == "2" else _THIRD) | shape for size, shape in _SHAPES.items()},
    "3.1-8b": _THIRD | _SHAPES["3-8b"] | _scaled(8.0),
    "3.1-70b": _THIRD | _SHAPES["3-70b"] | _scaled(8.0),
    "3.1-405b": _THIRD | sizes(126, 16_384, 53_248, 128, 8) | _scaled(8.0),
    "3.2-1b": _THIRD | sizes(16, 2048, 8192, 32, 8) | _scaled(32.0) | {"tie_embeddings": True},
    "3.2-3b": _THIRD | sizes(28, 3072, 8192, 24, 8) | _scaled(32.0) | {"tie_embeddings": True},
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(SIZES, tie_embeddings=False)
