r"""Medusa-2 for the shipped target: the heads of Medusa, and the target with them.

python scripts/train_drafter.py --config=configs/drafters/medusa2.py --workdir=runs/medusa2 \
    --config.init=runs/medusa/drafter

**It changes the target**: `runs/medusa2/model` is another model, with other samples, and only that
one fits the drafter. Its distribution is held near the old one by their divergence, which counts
five times as much as the heads (Cai et al. 2024, arXiv 2401.10774, 2.2.2 and 2.3.2). The heads are
trained alone first, by configs/drafters/medusa.py.
Hardware: any.
"""

import pathlib
import runpy


def get_config():
    """Returns the options of `spsjax.training.train_head.train_head`."""
    config = runpy.run_path(str(pathlib.Path(__file__).with_name("medusa.py")))["get_config"]()
    config.objective.update({"token": 0.2, "target": 1.0})
    config.optimization.learning_rate = 5e-4
    return config
