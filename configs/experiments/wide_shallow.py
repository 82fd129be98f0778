r"""Comparison of drafts of equal size with 1, 2, 4 and 8 layers.

python scripts/compare.py --config=configs/experiments/wide_shallow.py \
    --workdir=runs/wide_shallow

Each draft has 1.90 million parameters within 0.5%, the tied embedding included. All are trained
alike.
Hardware: any; measured on two CPU cores. Time: an hour and three quarters, on a shared machine.
Figures: 4 layers have the highest acceptance (0.861 on held-out text), and 2 layers the highest
speed-up (1.00 at temperature 1). A step of 8 layers takes 1.8 times as long as one of 1 layer
(docs/reproductions/distillspec.md).
"""

from spsjax.cli import sections

_SHAPES = {  # by number of layers; every draft has 8 heads and 8 key-value heads
    1: {"d_model": 256, "d_ff": 768, "head_dim": 32},
    2: {"d_model": 200, "d_ff": 624, "head_dim": 26},
    4: {"d_model": 152, "d_ff": 488, "head_dim": 20},
    8: {"d_model": 112, "d_ff": 368, "head_dim": 16},
}

get_config = sections.config(
    **sections.drafts(
        {f"layers_{count}": {"model": {"num_layers": count} | _SHAPES[count]} for count in _SHAPES},
        start={},
        objective={"name": "forward_kl", "temperatures": (1.0,)},
        eval_every=1000,
        steps=2000,
    )
)
