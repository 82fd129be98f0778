"""Sub-layers that the shipped target can leave out when it drafts for itself.

python scripts/plan.py --config=configs/experiments/plan_skips.py --workdir=runs/plan
python scripts/generate.py --config.drafter=early_exit:runs/plan/skips.json --prompt="import os"

Hardware: any.
"""

from spsjax.cli import sections

get_config = sections.config(
    plan="skips",
    target="pystdlib/target",
    **sections.dtype(),
    **sections.mesh(),
    sampling=sections.sampling(0.8, 0.95),
    most_tokens=8,  # greatest K
    **sections.prompts(),
)
