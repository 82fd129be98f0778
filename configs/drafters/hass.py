r"""HASS for the shipped target: EAGLE-1's drafter, trained on its own features of earlier steps.

python scripts/train.py --config=configs/drafters/hass.py --workdir=runs/hass

Losses and steps are those of the authors (Zhang et al. 2024, arXiv 2408.15766).
Hardware: any. Two CPU cores train on 600 tokens per second, of 10 million (AMD EPYC, Zen 3, texts
of 128 tokens).
"""

from spsjax.cli import sections
from spsjax.training.config import LAYER_SIZES

get_config = sections.training(
    "features",
    drafter={"method": "eagle", **LAYER_SIZES},
    objective={
        "steps": 3,
        "detached": True,
        "token": 0.1,
        "feature": 1.0,
        "top_k": 1.0,
        "noise": 0.2,
    },
)
