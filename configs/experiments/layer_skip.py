r"""The shipped target, trained further so that its first layers can draft (LayerSkip).

python scripts/train_target.py --config=configs/experiments/layer_skip.py --workdir=runs/layer_skip
python scripts/generate.py --target=runs/layer_skip/model --config.drafter=early_exit:3 \
    --prompt="import os"

Hardware: any; meant for two CPU cores (15 minutes).
Figures: docs/drafters.md, "The target drafts for itself".
"""

import pathlib
import runpy

import ml_collections

_BASE = pathlib.Path(__file__).with_name("pystdlib_target.py")


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `pystdlib_target.py` with exits that are trained."""
    config = runpy.run_path(str(_BASE))["get_config"]()
    config.update(
        {
            "init": "pystdlib/target",
            # Options of `training.layer_skip.LayerSkip`.
            "layer_skip": {"dropout": 0.1, "exit_scale": 0.5, "every": 2},
            "compute": {"dtype": "bfloat16"},
            "steps": 1000,
            "optimization": {"learning_rate": 5e-4, "warmup": 50},
            "eval_every": 250,
        }
    )
    return config
