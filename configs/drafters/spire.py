r"""SPiRE for the shipped target: copies of its last two layers, with a window and a memory.

python scripts/train.py --config=configs/drafters/spire.py --workdir=runs/spire

Window, sinks, rollouts of four steps and the loss, half cross entropy and half acceptance, are
those of Neelam et al. 2025 (arXiv 2504.06419). Here the first step begins after every token, and
only the later ones after every fourth.
Hardware: any.
"""

from spsjax.cli import sections

get_config = sections.training(
    "features",
    drafter={
        "method": "spire",
        "num_layers": 2,  # copies of the target's last layers
        "sinks": 1,  # first tokens that the drafter attends to
        "recent": 64,  # last tokens that the drafter attends to
    },
    target_cache={"store": "nothing"},
    objective={"steps": 4, "every": 4, "divergence": "mixed:0.5"},
)
