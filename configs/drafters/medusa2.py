r"""Medusa-2 for the shipped target: the heads of Medusa, and the target with them.

python scripts/train.py --config=configs/drafters/medusa2.py --workdir=runs/medusa2 \
    --config.init=runs/medusa/drafter

**It changes the target**: `runs/medusa2/model` is another model, with other samples, and only that
one fits the drafter. The loss has the divergence from the old distribution with five times the
weight of the heads (Cai et al. 2024, arXiv 2401.10774, 2.2.2 and 2.3.2). The heads are first
trained alone, by configs/drafters/medusa.py.
Hardware: any.
"""

from spsjax.cli import sections

get_config = sections.changed(
    __file__,
    "medusa.py",
    objective={"token": 0.2, "target": 1.0},
    optimization={"learning_rate": 5e-4},
)
