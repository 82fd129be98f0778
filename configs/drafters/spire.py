r"""SPiRE for the shipped target: copies of its last two layers, with a window and a memory.

python scripts/train_drafter.py --config=configs/drafters/spire.py --workdir=runs/spire

Window, sinks, rollouts of four steps and the loss, half cross entropy and half acceptance, are
those of Neelam et al. 2025 (arXiv 2504.06419). Here the first step begins after every token, and
only the later ones after every fourth.
Hardware: any.
"""

from ml_collections import ConfigDict

from spsjax.training import train_head


def get_config():
    """Returns the options of `spsjax.training.train_head.train_head`."""
    config = train_head.default_config()
    config.drafter = ConfigDict(
        {
            "method": "spire",
            "num_layers": 2,  # copies of the target's last layers
            "sinks": 1,  # first tokens that are seen
            "recent": 64,  # last tokens that are seen
        }
    )
    config.target_cache.store = "nothing"
    config.objective.update({"steps": 4, "every": 4, "divergence": "mixed:0.5"})
    return config
