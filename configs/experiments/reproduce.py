r"""Table 1 and figure 1 of Chen et al. 2023 (arXiv 2302.01318), and Spec-Bench, for any pair.

python scripts/reproduce.py --experiment=table1 --workdir=runs/table1
python scripts/reproduce.py --experiment=figure1 --workdir=runs/figure1
python scripts/reproduce.py --experiment=specbench --workdir=runs/specbench \
    --config.tasks.spec_bench.path=question.jsonl

A task without a file is left out.
Hardware: any; measured on two cores of an Intel Xeon, whose cache holds the weights.
Time there: 50 minutes for table 1 and 13 for figure 1, with the commands of docs/archive, and 8
for Spec-Bench with at most 128 new tokens.
Figures there, in float32: speed-ups of 1.26 (stdlib), 1.11 (XSum) and 1.18 (HumanEval) with nucleus
sampling, and of 1.16 over all of Spec-Bench (docs/archive/0.1_xeon_float32.md).
"""

from spsjax.cli import sections

_TASKS = "stdlib", "xsum", "human_eval"
_PLAN = {
    "settings": (),  # names of the task's settings; (): all
    "samples": 1,  # per prompt, setting and system
    "new_tokens": 0,  # 0: as the task has it
    "limit": 0,  # number of prompts; 0: all that fit into the context
    "seed": 0,
    "timed": 100,  # prompts, evenly spaced, at which draft step and scoring are timed
}

# Batch 1 and K = 4 are the paper's.
get_config = sections.config(
    **sections.pair(),
    drafter="model",  # or a module of spsjax.drafters
    **sections.drafters(),
    **sections.mesh(),
    tasks={  # fields of spsjax/benchmarks/tasks/*.py
        "stdlib": {"lines": 20, "count": 100, "least": 3, "max_new_tokens": 128},
        "edit": {"characters": 500, "count": 100, "max_new_tokens": 256},
        # shots: solved example; path: articles; words: number per article, 0 for all.
        "xsum": {"shots": "", "path": "", "words": 0, "max_new_tokens": 128},
        "human_eval": {"path": "", "ks": (1, 10, 100), "max_new_tokens": 512},
        "spec_bench": {"path": "", "max_new_tokens": 1024},
    },
    table1={"tasks": _TASKS, "num_speculative_tokens": (4,), "plan": _PLAN},
    figure1={
        "tasks": _TASKS,
        "num_speculative_tokens": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
        "plan": _PLAN | {"settings": ("nucleus",), "new_tokens": 128, "limit": 30},
    },
    specbench={"tasks": ("spec_bench",), "num_speculative_tokens": (4,), "plan": _PLAN},
    analysed_texts=40,  # texts per setting whose tokens are analysed
    **sections.peer(4),
)
