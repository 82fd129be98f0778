r"""Drafts of one shape and budget, distilled with different objectives on different texts.

python scripts/compare_drafts.py --config=configs/experiments/distillspec.py \
    --workdir=runs/distillspec

A draft is first trained on the text itself (cross entropy); each run starts from there, with the
same number of steps and of tokens per step. Results: docs/distillation.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns the runs, as changes of `configs/experiments/pystdlib_draft.py`."""
    objectives = (
        "cross_entropy",
        "forward_kl",
        "reverse_kl",
        "jensen_shannon",
        "total_variation",
        "negative_log_acceptance",
        "lk_hybrid",
    )
    texts = {
        "target": {"corpus": 0.0, "target": 1.0},
        "draft": {"corpus": 0.0, "draft": 1.0},
        "mixed": {"corpus": 0.5, "draft": 0.5},
    }
    runs = {
        f"{objective}_on_corpus": {"objective": {"name": objective}} for objective in objectives
    }
    for objective in ("forward_kl", "lk_hybrid"):
        for name in ("target", "mixed", "draft"):
            runs[f"{objective}_on_{name}"] = {
                "objective": {"name": objective},
                "mixture": texts[name],
            }
    return ml_collections.ConfigDict(
        {
            "base": "pystdlib_draft",  # name of a config in this folder
            "common": {
                "objective": {"temperatures": (1.0,)},
                "cache": "",  # folder of the target's states; empty: a folder of this comparison
                "trial": {"prompts": 64, "new_tokens": 96},
                "mixture": {"samples": 640},
                "eval_every": 600,
                "eval_examples": 128,
                "steps": 600,
                "optimization": {"learning_rate": 1e-3, "warmup": 50},
            },
            "start": {
                "objective": {"name": "cross_entropy"},
                "steps": 1500,
                "optimization": {"learning_rate": 2e-3, "final_rate": 0.5},
            },
            "runs": runs,
            "speed": {
                "prompts": 16,  # 0: speed is not measured
                "prompt_tokens": 64,
                "max_new_tokens": 96,
                "repetitions": 2,
                "num_speculative_tokens": 4,
                "temperature": 1.0,
            },
        }
    )
