r"""Medusa-1 for the shipped target: a head per draft token, on the last state.

python scripts/train.py --config=configs/drafters/medusa.py --workdir=runs/medusa

Each head counts 0.8 times as much as the one before (Cai et al. 2024, arXiv 2401.10774); all count
alike with --config.objective.decay=1.
Hardware: any.
"""

from spsjax.cli import sections

get_config = sections.training(
    "features",
    drafter={
        "method": "medusa",
        "num_heads": 4,
        "own_heads": True,  # a vocabulary matrix per head; False: the target's
        "num_blocks": 1,
    },
    target_cache={"store": "nothing"},
    objective={"steps": 4, "decay": 0.8},
)
