r"""MLP speculator for the shipped target: a recurrent network on the last state.

python scripts/train_drafter.py --config=configs/drafters/mlp_speculator.py --workdir=runs/mlp

The network is that of Wertheimer et al. 2024 (arXiv 2404.19124). Their second stage goes on with
texts that the target writes after short prompts, at a tenth of the learning rate:

python scripts/train_drafter.py --config=configs/drafters/mlp_speculator.py --workdir=runs/mlp2 \
    --config.init=runs/mlp/drafter --config.mixture.target=1 --config.mixture.corpus=0 \
    --config.optimization.learning_rate=1e-4
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
