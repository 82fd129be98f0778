r"""Drafts of one size with 1, 2, 4 or 8 layers: the effect of width and depth.

python scripts/compare_drafts.py --config=configs/experiments/wide_shallow.py \
    --workdir=runs/wide_shallow

Each has 1.90 million parameters, within 0.5%, the tied embedding included. All are
trained in the same way. Results: docs/distillation.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns the runs, as changes of `configs/experiments/pystdlib_draft.py`."""
    shapes = {  # by number of layers; 8 heads, each with its own keys
        1: {"d_model": 256, "d_ff": 768, "head_dim": 32},
        2: {"d_model": 200, "d_ff": 624, "head_dim": 26},
        4: {"d_model": 152, "d_ff": 488, "head_dim": 20},
        8: {"d_model": 112, "d_ff": 368, "head_dim": 16},
    }
    return ml_collections.ConfigDict(
        {
            "base": "pystdlib_draft",  # name of a config in this folder
            "common": {
                "objective": {"name": "forward_kl", "temperatures": (1.0,)},
                "cache": "",  # folder of the target's states; empty: a folder of this comparison
                "trial": {"prompts": 64, "new_tokens": 96},
                "eval_every": 1000,
                "eval_examples": 128,
                "steps": 2000,
            },
            "start": {},  # random weights
            "runs": {
                f"layers_{layers}": {"model": {"num_layers": layers, **shape}}
                for layers, shape in shapes.items()
            },
            "speed": {
                "prompts": 16,
                "prompt_tokens": 64,
                "max_new_tokens": 96,
                "repetitions": 2,
                "num_speculative_tokens": 4,
                "temperature": 1.0,
            },
        }
    )
