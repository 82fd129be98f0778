r"""Distillation of the shipped draft: one wide layer, 1.9M parameters.

python scripts/train_drafter.py --config=configs/experiments/pystdlib_draft.py \
    --config.target=runs/target/model --workdir=runs/draft

Hardware: any; meant for two CPU cores.
Time there, partly beside other work: 12 minutes for the target's states, and 56 minutes for 10,000
of the 15,500 steps.
Figures on held-out text at temperature 1: acceptance 0.865, greedy agreement 0.789
(docs/results.md).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns the options of `spsjax.training.train_draft.distill_draft`."""
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
            "init": "",  # folder of the initial model; empty: random weights
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "objective": {"name": "lk_hybrid", "temperatures": (0.8,)},
            "mixture": {
                "corpus": 1.0,
                "target": 0.0,
                "draft": 0.0,
                "samples": 1024,
                "batch": 16,
                "prompt_length": 32,
                "temperature": 1.0,
            },
            "target_cache": {"store": "states", "k": 64, "batch": 2},
            "cache": "",  # folder of the target cache; empty: in the run's folder
            "draft_eval": {
                "prompts": 16,
                "prompt_length": 32,
                "new_tokens": 64,
                "num_speculative_tokens": 4,
                "temperatures": (1.0, 0.0),
            },
            "length": 512,
            "batch": 2,
            "steps": 15_500,
            "optimization": {
                "learning_rate": 2e-3,
                "warmup": 100,
                "final_rate": 0.0,
                "weight_decay": 0.0,
                "clip": 1.0,
                "b1": 0.9,
                "b2": 0.95,
                "accumulate": 1,
            },
            "compute": {"dtype": "", "remat": False},
            "mesh": {"data": 1, "model": 1},
            "seed": 0,
            "eval_every": 1000,
            "eval_examples": 64,
            "log_every": 10,
            "keep": 2,
            "keep_best": 1,
        }
    )
