r"""EAGLE-3 for the shipped target: a decoder layer on three of its layers, trained to draft far.

python scripts/train.py --config=configs/drafters/eagle3.py --workdir=runs/eagle3
python scripts/train.py --config=configs/drafters/eagle3.py --workdir=runs/mine \
    --config.target=FOLDER --config.data.train="('runs/answers',)"   # experiments/answers.py

Steps and decay are those of the authors (Li et al. 2025, arXiv 2503.01840).
Hardware: an accelerator. Two CPU cores train a layer 256 wide on 820 tokens per second (Intel Xeon,
texts of 256 tokens), and a layer 512 wide on 1,400 with objective.every=4.
"""

from spsjax.cli import sections
from spsjax.training.config import LAYER_SIZES

get_config = sections.training(
    "features",
    drafter={
        "method": "eagle3",
        **LAYER_SIZES,
        # Width of the layer; 0: the target's, as vLLM needs it. The head is then initialized
        # with the target's.
        "d_model": 0,
        "vocab_size": 0,  # number of drafted tokens, the most frequent of the corpus; 0: all
        "tap_layers": (),  # layers whose inputs are read; (): a low, a middle and a high one
        "fc_norm": False,
        "norm_output": False,
    },
    target_cache={"store": "nothing"},  # its states would take 4 kB per token
    objective={"steps": 7, "decay": 0.8},
)
