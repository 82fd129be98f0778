r"""Distillation of the shipped draft: one wide layer, 1.9M parameters.

python scripts/train.py --config=configs/experiments/pystdlib_draft.py \
    --config.target=runs/target/model --workdir=runs/draft

Hardware: any; meant for two CPU cores.
Time on a partly shared machine: 12 minutes for the target's states, and 56 minutes for 10,000
of the 15,500 steps.
Figures on held-out text at temperature 1: acceptance 0.865, greedy agreement 0.789
(docs/archive/0.1_epyc_zen4_float32.md).
"""

from spsjax.cli import sections

get_config = sections.training(
    "draft",
    model={
        "d_model": 256,
        "d_ff": 768,
        "num_layers": 1,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 32,
    },
    objective={"temperatures": (0.8,)},
    steps=15_500,
    optimization={"learning_rate": 2e-3},
)
