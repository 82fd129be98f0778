r"""DFlash2 for the shipped target: DFlash with convolutions and a selector of candidates.

python scripts/train.py --config=configs/drafters/dflash2.py --workdir=runs/dflash2

The slots are trained as those of DFlash, and the selector by the cross entropy of the target's most
probable token among 16 candidates, which counts as much (inco.ai, 2026). Of the 512 tokens of a
text, 64 random ones begin a block.
Hardware: an accelerator.
"""

from spsjax.cli import sections
from spsjax.training.config import LAYER_SIZES

get_config = sections.training(
    "features",
    drafter={
        "method": "dflash2",
        **LAYER_SIZES,
        "num_layers": 5,
        "block_size": 8,  # the anchor's slot and seven that draft
        "mask_token_id": -1,  # -1: the last row of the target's embedding
        "tap_layers": (),  # layers whose inputs are read; (): as many, evenly spaced
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
    target_cache={"store": "nothing"},
    objective={"steps": 7, "decay": 0.78, "anchors": 64, "own": 1.0},
)
