r"""DFlash for the shipped target: a block of mask tokens, read by layers on the target's features.

python scripts/train.py --config=configs/drafters/dflash.py --workdir=runs/dflash

Slot k counts exp(-(k - 1) / 4) times as much as the first (Chen et al. 2026, arXiv 2602.06036). Of
the 512 tokens of a text, 64 random ones begin a block; the authors draw 512 of longer texts. With
the weights of D-PACE (arXiv 2605.18810) in place of the decay:
--config.objective.pace=0.5 --config.objective.decay=1 --config.objective.divergence=best_token
Hardware: an accelerator.
"""

from spsjax.cli import sections
from spsjax.training.config import LAYER_SIZES

get_config = sections.training(
    "features",
    drafter={
        "method": "dflash",
        **LAYER_SIZES,
        "num_layers": 5,
        "block_size": 8,  # the anchor's slot and seven that draft
        "mask_token_id": -1,  # -1: the last row of the target's embedding
        "tap_layers": (),  # layers whose inputs are read; (): as many, evenly spaced
        "causal": "none",
    },
    target_cache={"store": "nothing"},
    objective={"steps": 7, "decay": 0.78, "anchors": 64},
)
