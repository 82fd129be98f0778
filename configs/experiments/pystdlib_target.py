"""Training of the shipped target: 18.6M parameters, on CPython's standard library.

python scripts/train_target.py --config=configs/experiments/pystdlib_target.py --workdir=runs/target

Hardware: any; meant for two CPU cores. Time: 61 minutes there, partly beside other work.
Figures: 4.04 nats per token on held-out files, and 4.01 in a second run (docs/results.md).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns the options of `spsjax.training.train_target.train_target`."""
    return ml_collections.ConfigDict(
        {
            "model": {
                "vocab_size": 4096,
                "d_model": 512,
                "d_ff": 1280,
                "num_layers": 6,
                "num_heads": 8,
                "num_kv_heads": 4,
                "head_dim": 64,
                "max_positions": 512,
            },
            "tokenizer": "",  # path of a tokenizer; empty: one is trained
            "init": "",  # folder of the initial model; empty: random weights
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "length": 512,
            "batch": 2,
            "steps": 2000,
            "optimization": {
                "learning_rate": 1e-3,
                "warmup": 200,
                "final_rate": 0.1,
                "weight_decay": 0.1,
                "clip": 1.0,
                "b1": 0.9,
                "b2": 0.95,
                "accumulate": 1,
            },
            "compute": {"dtype": "", "remat": False},
            "mesh": {"data": 1, "model": 1},
            "seed": 0,
            "eval_every": 200,
            "eval_examples": 64,
            "log_every": 10,
            "keep": 2,
            "keep_best": 1,
        }
    )
