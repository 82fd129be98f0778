r"""EAGLE-1 for the shipped target: one decoder layer that regresses the target's next feature.

python scripts/train.py --config=configs/drafters/eagle.py --workdir=runs/eagle

Losses and noise are those of the authors (Li et al. 2024, arXiv 2401.15077).
Hardware: any. Two CPU cores train on 1,600 tokens per second, of 10 million (AMD EPYC, Zen 3).
"""

from spsjax.cli import sections
from spsjax.training.config import LAYER_SIZES

get_config = sections.training(
    "features",
    drafter={"method": "eagle", **LAYER_SIZES},
    objective={"token": 0.1, "feature": 1.0, "noise": 0.2},
)
