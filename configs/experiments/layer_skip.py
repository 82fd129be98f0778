r"""The shipped target, trained further so that its first layers can draft (LayerSkip).

python scripts/train.py --config=configs/experiments/layer_skip.py --workdir=runs/layer_skip
python scripts/generate.py --target=runs/layer_skip/model --config.drafter=early_exit:3 \
    --prompt="import os"

Hardware: any; meant for two CPU cores (15 minutes).
Figures: docs/archive/0.1_epyc_zen4.md, "Early exits".
"""

from spsjax.cli import sections

get_config = sections.changed(
    __file__,
    "pystdlib_target.py",
    init="pystdlib/target",
    # Options of `training.layer_skip.LayerSkip`.
    layer_skip={"dropout": 0.1, "exit_scale": 0.5, "every": 2},
    compute={"dtype": "bfloat16"},
    steps=1000,
    optimization={"learning_rate": 5e-4, "warmup": 50},
    eval_every=250,
)
