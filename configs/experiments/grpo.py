r"""Reinforcement learning on a toy reward, by GRPO: plain, with a frozen and with a learning draft.

python scripts/grpo.py --workdir=runs/grpo
python scripts/grpo.py --workdir=runs/grpo --config.arms="('refreshed',)" --config.steps=40

The reward is the share of lower-case letters in the new text: code turns into prose, which a draft
that was trained on code does not know.
Hardware: two CPU cores, about ten minutes.
"""

from spsjax.cli import sections

get_config = sections.config(
    **sections.pair(),
    arms=("plain", "frozen", "refreshed"),  # which runs to make, each from the same weights
    prompts=(
        "def read_config(path):\n",
        "class Queue:\n",
        "import os\nimport sys\n\n\ndef main(argv):\n",
        'def total(values):\n    """',
    ),
    num_speculative_tokens=4,
    samples=8,  # of each prompt, in each step
    max_new_tokens=48,
    rows=4,  # samples that run at the same time
    steps=40,
    learning_rate=2e-4,
    clip=0.2,  # how far the ratio of new to old probability counts
    drafter={"steps": 3, "learning_rate": 3e-4, "batch": 16, "texts": 128},  # of a learning draft
    seed=0,
)
