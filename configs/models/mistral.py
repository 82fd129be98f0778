r"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825) and Mixtral 8x7B (2024, arXiv 2401.04088).

python scripts/compile.py --topology=v5e:4x4 --config=configs/experiments/chinchilla_70b.py \
    --config.target=mistral:8x7b --config.draft=mistral:7b

Sizes: 7b, 7b-v0.3 and 8x7b. `mistral:7b` is the model of the paper, with windows of 4,096 tokens.
`mistral:7b-v0.3` has none.
Hardware: any with memory for the weights; the command needs a CPU and libtpu. Not measured.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

SIZES = {
    "7b": {"windows": (4096,)},
    "7b-v0.3": {"vocab_size": 32_768, "rope_theta": 1e6},
    "8x7b": {"num_experts": 8, "experts_per_token": 2, "rope_theta": 1e6},
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(
    SIZES,
    **sizes(32, 4096, 14_336, 32, 8, vocab_size=32_000),
    max_positions=32_768,
    rope_theta=10_000.0,
    tie_embeddings=False,
)
