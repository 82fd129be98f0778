"""Chinchilla 70B: 70.1B parameters, the target of Chen et al. 2023 (arXiv 2302.01318), Table 2.

python scripts/compile.py --topology=v5p:2x2x4 --config=configs/experiments/chinchilla_70b.py

Table 2 gives width, heads and layers. Relative positions and RMSNorm are those of Gopher (Rae et
al. 2021, arXiv 2112.11446). No paper states the feed-forward width. It is 4 d_model, because that
gives the published number of parameters. There are no public weights.
Hardware: meant for 16 chips. Target and draft need 9.28 GB per chip for weights in bfloat16, by
the TPU compiler's count (docs/archive/0.1_tpu_compiler.md).
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

# The fields of `spsjax.models.config.Config`.
get_config = sections.config(
    vocab_size=32_000,
    max_positions=2048,
    positions="relative",
    ffn="gelu",
    **sizes(80, 8192, 4 * 8192, 64, 64),
)
