r"""Blockwise parallel decoding: heads that share a hidden layer.

python scripts/train.py --config=configs/drafters/blockwise.py --workdir=runs/blockwise

Stern et al. 2018 (arXiv 1811.03115), with a frozen target.
Hardware: any.
"""

from spsjax.cli import sections

get_config = sections.training(
    "features",
    drafter={"method": "blockwise", "num_heads": 4, "d_ff": 512},  # hidden units per head
    target_cache={"store": "nothing"},
    objective={"steps": 4, "one": True},  # a batch trains one head
)
