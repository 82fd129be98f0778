"""The draft of the shipped pair: one wide layer, 1.9M parameters, distilled from the target.

python scripts/train_drafter.py --config=configs/experiments/pystdlib_draft.py \
    --config.target=runs/target/model --workdir=runs/draft
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Shape, objective and optimisation."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "model": {
                "d_model": 256,
                "d_ff": 768,
                "num_layers": 1,
                "num_heads": 8,
                "num_kv_heads": 8,
                "head_dim": 32,
            },
            "objective": "lk_hybrid",
            "temperatures": (0.8,),
            "length": 512,
            "batch": 2,
            "steps": 15_500,
            "learning_rate": 2e-3,
            "warmup": 100,
            "weight_decay": 0.0,
            "seed": 0,
            "checkpoint_every": 250,
            "eval_every": 250,
        }
    )
