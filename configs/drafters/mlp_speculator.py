r"""MLP speculator for the shipped target: a recurrent network on the last state.

python scripts/train_drafter.py --config=configs/drafters/mlp_speculator.py --workdir=runs/mlp

The network is that of Wertheimer et al. 2024 (arXiv 2404.19124).
Hardware: any.
"""

from ml_collections import ConfigDict

from spsjax.training import train_head


def get_config():
    """Returns the options of `spsjax.training.train_head.train_head`."""
    config = train_head.default_config()
    config.drafter = ConfigDict(
        {
            "method": "mlp_speculator",
            "num_steps": 4,
            "width": 512,
            "tied": True,
            "scale_input": True,
        }
    )
    config.target_cache.store = "nothing"
    config.objective.update({"steps": 4})
    return config
