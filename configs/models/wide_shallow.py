"""A target of 13B and a wide, shallow draft for one accelerator: `wide_shallow:target`, `:draft`.

python scripts/benchmark.py --config=configs/experiments/shapes.py --workdir=runs/gpu

The proportions are those of Chinchilla 70B and its draft (Chen et al. 2023, arXiv 2302.01318,
Table 2): the draft has a tenth of the target's layers and three quarters of its width. The target
is Llama 2 13B, a shape that other libraries have, too. There are no public weights of the draft.
Hardware: one accelerator with 40 GB of memory, in bfloat16.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

SIZES = {"target": sizes(40, 5120, 13_824, 40, 40), "draft": sizes(4, 3840, 10_368, 30, 30)}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(SIZES, vocab_size=32_000, max_positions=4096, tie_embeddings=False)
