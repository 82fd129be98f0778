r"""Medusa-1 for the shipped target: a head per draft token, on the last state.

python scripts/train_drafter.py --config=configs/drafters/medusa.py --workdir=runs/medusa

Each head counts 0.8 times as much as the one before (Cai et al. 2024, arXiv 2401.10774); all count
alike with --config.objective.decay=1.
Hardware: any.
"""

from ml_collections import ConfigDict

from spsjax.training import train_head


def get_config():
    """Returns the options of `spsjax.training.train_head.train_head`."""
    config = train_head.default_config()
    config.drafter = ConfigDict(
        {
            "method": "medusa",
            "num_heads": 4,
            "own_heads": True,  # a vocabulary matrix per head; False: the target's
            "num_blocks": 1,
        }
    )
    config.target_cache.store = "nothing"
    config.objective.update({"steps": 4, "decay": 0.8})
    return config
