r"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437): `deepseek:v3`.

python scripts/compile.py --topology=v5p:4x4x4 --config=configs/experiments/chinchilla_70b.py \
    --config.target=deepseek:v3 --config.draft=mixture:draft

Sizes: v3, without the layer that predicts a further token.
Hardware: any with memory for the weights; the command needs a CPU and libtpu. Not measured.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

_DENSE = ("d_ff", 18_432), ("num_experts", 0)
SIZES = {"v3": sizes(61, 7168, 2048, 128, 1, 192)}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(
    SIZES,
    vocab_size=129_280,
    max_positions=163_840,
    mixer="latent",
    query_rank=1536,
    latent_rank=512,
    rotary_dim=64,
    value_dim=128,
    rope_interleaved=True,
    rope_scaling=("yarn", 40.0, 32.0, 1.0, 4096.0, 1.0, True),
    query_scale=192**-0.5 * 1.3688879454113936**2,  # YaRN's 1 + 0.1 log 40, squared
    changes=((_DENSE,) * 3 + ((),) * 58),
    router="sigmoid",
    num_experts=256,
    experts_per_token=8,
    expert_groups=8,
    groups_per_token=4,
    expert_scale=2.5,
    shared_d_ff=2048,
    norm_eps=1e-6,
    tie_embeddings=False,
)
