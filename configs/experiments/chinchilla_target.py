r"""Chinchilla 70B, trained as Hoffmann et al. 2022 (arXiv 2203.15556) describe.

python scripts/train_target.py --config=configs/experiments/chinchilla_target.py \
    --config.data.train="('/mnt/text/**/*.jsonl.gz',)" --workdir=/mnt/runs/chinchilla --distributed

Published there: 1.4T tokens, 3M tokens per batch (1.5M in the first half), length 2,048, AdamW, a
learning rate of 1e-4 with cosine decay to a tenth, bfloat16 with float32 weights in the optimizer.
Taken from Gopher (Rae et al. 2021, arXiv 2112.11446): 1,500 warm-up steps, gradients clipped to a
norm of 1. Our own choice, because it is not published: weight decay and AdamW's betas. This config
has not been run.
"""

import pathlib
import runpy

import ml_collections

_CONFIGS = pathlib.Path(__file__).parent.parent


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `pystdlib_target.py` with the paper's shape and optimizer."""
    config = runpy.run_path(str(_CONFIGS / "experiments" / "pystdlib_target.py"))["get_config"]()
    config.model = runpy.run_path(str(_CONFIGS / "models" / "chinchilla_70b.py"))["get_config"]()
    config.update(
        {
            "length": 2048,
            "batch": 1536,
            "steps": 445_000,
            "optimization": {
                "learning_rate": 1e-4,
                "warmup": 1500,
                "final_rate": 0.1,
                "weight_decay": 0.1,
                "accumulate": 12,
            },
            "compute": {"dtype": "bfloat16", "remat": True},
            "mesh": {"data": 16, "model": 16},
            "eval_every": 1000,
            "eval_examples": 1024,
        }
    )
    return config
