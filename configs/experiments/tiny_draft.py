r"""Distillation of a tiny draft, 0.07M parameters, from the target of `tiny_target.py`.

python scripts/train_drafter.py --config=configs/experiments/tiny_draft.py --workdir=runs/tiny/draft

Hardware: any. Time: 59 s on two cores of an AMD EPYC (Zen 3) virtual machine, beside other work.
Figures there on held-out text at temperature 1: acceptance 0.850, greedy agreement 0.734.
"""

import pathlib
import runpy

import ml_collections

_CONFIGS = pathlib.Path(__file__).parent


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `pystdlib_draft.py` with changes; text and steps are the target's."""
    config = runpy.run_path(str(_CONFIGS / "pystdlib_draft.py"))["get_config"]()
    target = runpy.run_path(str(_CONFIGS / "tiny_target.py"))["get_config"]()
    for key in ("data", "length", "batch", "steps", "eval_every", "eval_examples"):
        config[key] = target[key]
    config.update(
        {
            "target": "runs/tiny/target/model",
            "model": {"d_model": 64, "d_ff": 128, "head_dim": 8},
            "objective": {"name": "forward_kl", "temperatures": (1.0,)},
            "target_cache": {"store": "nothing"},
            "draft_eval": {"prompt_length": 16, "new_tokens": 48},
            "optimization": {"warmup": 20, "learning_rate": 4e-3},
        }
    )
    return config
