r"""Which objective, on which texts: drafts of one shape and budget, distilled in different ways.

python scripts/compare_drafts.py --config=configs/experiments/distillspec.py \
    --workdir=runs/distillspec

A draft is first trained on the text itself (cross entropy); each run goes on from there, with the
same number of steps and of tokens a step. Results: docs/distillation.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The runs, as changes of `configs/experiments/pystdlib_draft.py`."""
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
        "corpus": {"corpus": 1.0},
        "target": {"corpus": 0.0, "target": 1.0},
        "draft": {"corpus": 0.0, "draft": 1.0},
        "mixed": {"corpus": 0.5, "draft": 0.5},
    }
    runs = {f"{objective}.corpus": {"objective": {"name": objective}} for objective in objectives}
    for objective in ("forward_kl", "reverse_kl", "total_variation", "lk_hybrid"):
        for name in ("target", "mixed", "draft"):
            runs[f"{objective}.{name}"] = {
                "objective": {"name": objective},
                "mixture": texts[name],
            }
    return ml_collections.ConfigDict(
        {
            "config": "pystdlib_draft",
            "common": {
                "objective": {"temperatures": (1.0,)},
                "teacher": {"keep": "nothing"},
                "trial": {"prompts": 64, "new_tokens": 96},
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
            "runs": {name.replace(".", "__"): changes for name, changes in runs.items()},
            "speed": {"num_speculative_tokens": 4, "prompts": 4},
        }
    )
