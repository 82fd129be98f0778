"""All rules of verification on chains and trees of the shipped draft.

python scripts/compare_verifiers.py --workdir=runs/verifiers
python scripts/compare_verifiers.py --workdir=runs/verifiers --config.timed=False   # without times

Hardware: any; meant for a machine with nothing else running.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the pair, the sampling settings, and the sizes of drafts."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "mesh": {"data": 1, "model": 1},  # devices; model = 0: all that there are
            "run_settings": ("sampled", "nucleus", "cold", "greedy"),
            "settings": {
                "sampled": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
                "nucleus": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
                "cold": {"temperature": 0.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
                "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            },
            "num_nodes": (4, 8, 16, 32, 64),  # draft tokens per round
            "levels": 4,  # of trees
            "longest_chain": 16,
            "most_children": 8,
            "planned_for": "nucleus",  # the setting for which the shapes of trees are best
            "timed": True,  # also run the loop by every rule: time per token, and the test of laws
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
            "seed": 0,
        }
    )
