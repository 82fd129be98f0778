"""The best tree of draft tokens for a pair, a sampling setting and this machine.

python scripts/plan_tree.py --output=runs/tree.json
python scripts/plan_tree.py --output=runs/tree.json --config.sampling.temperature=0

Hardware: any; costs are measured where it runs. Time: a minute on two cores of an AMD EPYC (Zen 3).
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the pair, the sampling parameters, and the sizes of trees to plan."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "mesh": {"data": 1, "model": 1},  # devices; model = 0: all that there are
            "sampling": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
            "num_nodes": (2, 4, 8, 16, 32, 64),  # draft tokens of the trees
            "most_children": 8,
            "most_levels": 16,
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
            "repetitions": 5,  # of the timed passes
            "seed": 0,
        }
    )
