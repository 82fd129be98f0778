r"""Falcon for the shipped target: an LSTM and a decoder layer draft two tokens per pass.

python scripts/train.py --config=configs/drafters/falcon.py --workdir=runs/falcon

Losses and noise are those of Gao et al. 2024 (arXiv 2412.12639). Their share of glances falls from
0.45 to 0.1 in the course of the training; here it is constant.
Hardware: any.
"""

from spsjax.cli import sections
from spsjax.training.config import LAYER_SIZES

get_config = sections.training(
    "features",
    drafter={"method": "falcon", **LAYER_SIZES, "tokens_per_step": 2},
    objective={"steps": 2, "token": 0.1, "feature": 1.0, "noise": 0.2, "glance": 0.25},
)
