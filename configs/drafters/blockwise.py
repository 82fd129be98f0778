r"""Blockwise parallel decoding: heads that share a hidden layer.

python scripts/train_drafter.py --config=configs/drafters/blockwise.py --workdir=runs/blockwise

Stern et al. 2018 (arXiv 1811.03115), with a frozen target.
Hardware: any.
"""

from ml_collections import ConfigDict

from spsjax.training import train_head


def get_config():
    """Returns the options of `spsjax.training.train_head.train_head`."""
    config = train_head.default_config()
    config.drafter = ConfigDict(
        {
            "method": "blockwise",
            "num_heads": 4,
            "d_ff": 512,  # hidden units per head
        }
    )
    config.target_cache.store = "nothing"
    config.objective.update({"steps": 4, "one": True})  # a batch trains one head
    return config
