r"""The head for multi-token prediction: fine-tuned from the target's own, or from random weights.

python scripts/train.py --config=configs/drafters/mtp.py --workdir=runs/mtp \
    --config.target=FOLDER --config.init=mtp   # the head in the target's folder
python scripts/train.py --config=configs/drafters/mtp.py --workdir=runs/new   # random weights

Heads were trained for one more token. FastMTP (Cai et al. 2025, arXiv 2509.18362) trains the same
head for three, on the target's own answers, with weights of 0.51, 0.31 and 0.18 by depth: a decay
of 0.6, divided by the sum.
Hardware: an accelerator.
"""

from spsjax.cli import sections

get_config = sections.training(
    "features",
    drafter={"method": "mtp"},  # all sizes of the layer are the target's
    target_cache={"store": "nothing"},
    objective={"steps": 3, "decay": 0.6},
)
