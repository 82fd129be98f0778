"""Drafters of the shipped target, as chains and as trees, on the same prompts.

python scripts/compare_drafters.py --workdir=runs/drafters \\
    --drafters=model=pystdlib/draft,EAGLE-3=runs/eagle3/drafter

Hardware: any; meant for a machine with nothing else running.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the target, the shapes of drafts, the sampling settings and the prompts."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "quantize": config_dict.placeholder(str),  # the target: int8, int8_dynamic
            "mesh": {"data": 1, "model": 1},  # devices; model = 0: all that there are
            "chains": (2, 4, 7),  # K
            "auto": False,  # whether also chains whose K is chosen in every round
            # Children of every node, level by level, of trees whose tokens are drawn.
            "branching": ((4, 2, 1, 1),),
            "dynamic": ((16, 5, 4),),  # nodes, levels and width of trees like EAGLE-2's
            "run_settings": ("sampled", "nucleus", "greedy"),
            "settings": {
                "sampled": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
                "nucleus": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
                "cold": {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
                "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            },
            # Prompts are those of these tasks, each a row of its own. Without tasks:
            "run_tasks": (),
            "stop_at_eos": False,  # whether texts end before `max_new_tokens`
            "tasks": {  # fields of spsjax/evaluation/tasks/*.py
                "stdlib": {"lines": 20, "count": 100, "least": 3},
                "edit": {"characters": 500, "count": 100},
                # shots: solved example; path: articles; words: number per article, 0 for all.
                "xsum": {"shots": "", "path": "", "words": 0},
                "human_eval": {"path": ""},
                "spec_bench": {"path": ""},
            },
            # Prompts are the beginnings of held-out documents of these sources.
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "texts": (),  # or these texts as prompts
            "prompts": 8,
            "prompt_tokens": 100,
            "max_new_tokens": 128,
            "repetitions": 1,
            "seed": 0,
        }
    )
