"""The target of the shipped pair: 18.6M parameters on CPython's standard library.

python scripts/train_target.py --config=configs/experiments/pystdlib_target.py --workdir=runs/target
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Shape, data and optimisation."""
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
            "length": 512,
            "batch": 2,
            "steps": 2000,
            "learning_rate": 1e-3,
            "warmup": 200,
            "weight_decay": 0.1,
            "seed": 0,
            "checkpoint_every": 200,
            "eval_every": 200,
        }
    )
