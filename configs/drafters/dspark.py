r"""DSpark for the shipped target: DFlash with a head that reads the draft token before.

python scripts/train.py --config=configs/drafters/dspark.py --workdir=runs/dspark

Slot k counts exp(-k / 4) times as much as the first, and the confidence head's loss as much as the
divergence (arXiv 2607.05147). Of the 512 tokens of a text, 64 random ones begin a block.
Hardware: an accelerator.
"""

from spsjax.cli import sections
from spsjax.training.config import LAYER_SIZES

get_config = sections.training(
    "features",
    drafter={
        "method": "dspark",
        **LAYER_SIZES,
        "num_layers": 5,
        "block_size": 7,  # slots, all of which draft
        "mask_token_id": -1,  # -1: the last row of the target's embedding
        "tap_layers": (),  # layers whose inputs are read; (): as many, evenly spaced
        "markov_rank": 256,
        "has_confidence": True,
    },
    target_cache={"store": "nothing"},
    objective={"steps": 7, "decay": 0.78, "anchors": 64, "own": 1.0},
)
