r"""GLM-4.5, GLM-4.5-Air (GLM team 2025, arXiv 2508.06471) and GLM-4.7-Flash: `glm:4.5-air`.

python scripts/compile.py --topology=v5p:2x2x4 --config=configs/experiments/chinchilla_70b.py \
    --config.target=glm:4.5-air --config.draft=mixture:draft

Sizes: 4.5, 4.5-air and 4.7-flash, without the layer that predicts a further token.
Hardware: any with memory for the weights; the command needs a CPU and libtpu. Not measured.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes


def _first_dense(count: int, layers: int, d_ff: int) -> dict:
    dense = ("d_ff", d_ff), ("num_experts", 0)
    return {"changes": (dense,) * count + ((),) * (layers - count)}


_GLM_4_5 = {
    "vocab_size": 151_552,
    "max_positions": 131_072,
    "rope_theta": 1e6,
    "rotary_dim": 64,
    "biases": "qkv",
    "experts_per_token": 8,
}
_FLASH = {
    "vocab_size": 154_880,
    "max_positions": 202_752,
    "layout": "glm4_moe_lite",
    "mixer": "latent",
    "query_rank": 768,
    "latent_rank": 512,
    "rotary_dim": 64,
    "value_dim": 256,
    "rope_interleaved": True,
    "rope_theta": 1e6,
    "num_experts": 64,
    "experts_per_token": 4,
    "expert_scale": 1.8,
    "shared_d_ff": 1536,
}
SIZES = {
    "4.5": sizes(92, 5120, 1536, 96, 8, 128, qk_norm=True, num_experts=160)
    | {"expert_scale": 2.5, "shared_d_ff": 1536}
    | _first_dense(3, 92, 12_288)
    | _GLM_4_5,
    "4.5-air": sizes(46, 4096, 1408, 96, 8, 128, num_experts=128, shared_d_ff=1408)
    | _first_dense(1, 46, 10_944)
    | _GLM_4_5,
    "4.7-flash": sizes(47, 2048, 1536, 20, 1, 256) | _first_dense(1, 47, 10_240) | _FLASH,
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(SIZES, router="sigmoid", tie_embeddings=False)
