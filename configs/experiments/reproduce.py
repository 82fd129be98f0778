"""Experiments of the literature for any pair of models and any tasks.

python scripts/reproduce.py --experiment=table1 --workdir=runs/table1
python scripts/reproduce.py --experiment=figure1 --workdir=runs/figure1
python scripts/reproduce.py --experiment=specbench --workdir=runs/specbench \\
    --config.tasks.spec_bench.path=question.jsonl

A task whose files are not named is left out. Results: docs/results.md.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the setting of Chen et al. 2023 (arXiv 2302.01318): batch 1, K = 4."""
    plan = {
        "settings": (),  # names of the task's settings; (): all
        "samples": 1,  # per prompt, setting and system
        "new_tokens": 0,  # 0: as the task has it
        "limit": 0,  # number of prompts; 0: all that fit into the context
        "seed": 0,
        "timed": 100,  # prompts, evenly spaced, at which draft step and scoring are timed
    }
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",
            "drafter": "model",  # or a module of spsjax.drafters
            "ngram": {"max_ngram": 3, "min_ngram": 1},
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "mesh": {"data": 1, "model": 1},  # devices; model = 0: all that there are
            "tasks": {  # fields of spsjax/evaluation/tasks/*.py
                "stdlib": {"lines": 20, "count": 100, "least": 3, "max_new_tokens": 128},
                # shots: solved example; path: articles; words: number per article, 0 for all.
                "xsum": {"shots": "", "path": "", "words": 0, "max_new_tokens": 128},
                "human_eval": {"path": "", "ks": (1, 10, 100), "max_new_tokens": 512},
                "spec_bench": {"path": "", "max_new_tokens": 1024},
            },
            "table1": {
                "tasks": ("stdlib", "xsum", "human_eval"),
                "num_speculative_tokens": (4,),
                "plan": plan,
            },
            "figure1": {
                "tasks": ("stdlib", "xsum", "human_eval"),
                "num_speculative_tokens": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
                "plan": plan | {"settings": ("nucleus",), "new_tokens": 128, "limit": 30},
            },
            "specbench": {
                "tasks": ("spec_bench",),
                "num_speculative_tokens": (4,),
                "plan": plan,
            },
            "analysed_texts": 40,  # texts per setting whose tokens are analysed one by one
            "peer": {
                "num_speculative_tokens": (4,),  # K of assisted generation
                "dtypes": ("float32",),
            },
        }
    )
