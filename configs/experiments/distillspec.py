r"""Comparison of distillation objectives and training texts, as in DistillSpec (arXiv 2310.08461).

python scripts/compare.py --config=configs/experiments/distillspec.py \
    --workdir=runs/distillspec

One draft is first trained on text with cross entropy. Each run continues from this draft, with the
same number of steps and of tokens per step.
Hardware: any; measured on two CPU cores. Time: 105 minutes, on a shared machine.
Figures: distilled drafts yield 16 to 19% more tokens per target call at temperature 1 than the
draft that continues with cross entropy (docs/distillation.md).
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
            "compare": "drafts",
            "base": "pystdlib_draft",  # a config in this folder
            "common": {
                "objective": {"temperatures": (1.0,)},
                "cache": "",  # folder of the target cache; empty: in the comparison's folder
                "draft_eval": {"prompts": 64, "new_tokens": 96},
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
                "prompts": 16,  # 0: do not measure speed
                "prompt_tokens": 64,
                "max_new_tokens": 96,
                "repetitions": 2,
                "num_speculative_tokens": 4,
                "temperature": 1.0,
            },
        }
    )
