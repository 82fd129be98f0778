r"""Comparison of distillation objectives and training texts, as in DistillSpec (arXiv 2310.08461).

python scripts/compare.py --config=configs/experiments/distillspec.py \
    --workdir=runs/distillspec

One draft is first trained on text with cross entropy. Each run continues from this draft, with the
same number of steps and of tokens per step.
Hardware: any; measured on two CPU cores. Time: 105 minutes, on a shared machine.
Figures: distilled drafts yield 16 to 19% more tokens per target call at temperature 1 than the
draft that continues with cross entropy (docs/reproductions/distillspec.md).
"""

from spsjax.cli import sections

_OBJECTIVES = (
    "cross_entropy",
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "negative_log_acceptance",
    "lk_hybrid",
)
_TEXTS = {
    "target": {"corpus": 0.0, "target": 1.0},
    "mixed": {"corpus": 0.5, "draft": 0.5},
    "draft": {"corpus": 0.0, "draft": 1.0},
}
_RUNS = {f"{name}_on_corpus": {"objective": {"name": name}} for name in _OBJECTIVES}
_RUNS |= {
    f"{name}_on_{texts}": {"objective": {"name": name}, "mixture": mixture}
    for name in ("forward_kl", "lk_hybrid")
    for texts, mixture in _TEXTS.items()
}

get_config = sections.config(
    **sections.drafts(
        _RUNS,
        start={
            "objective": {"name": "cross_entropy"},
            "steps": 1500,
            "optimization": {"learning_rate": 2e-3, "final_rate": 0.5},
        },
        objective={"temperatures": (1.0,)},
        mixture={"samples": 640},
        eval_every=600,
        steps=600,
        optimization={"learning_rate": 1e-3, "warmup": 50},
    )
)
