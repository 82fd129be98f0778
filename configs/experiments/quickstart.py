"""Quickstart: one text by both algorithms, then the speed-up.

bash scripts/quickstart.sh    # or, in an environment that has spsjax: python scripts/quickstart.py

Hardware: any; made for a laptop's CPU. Takes 2 min on two cores.
Expected there: docs/results.md.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns a small version of `benchmark.py` with a prompt."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "prompt": 'class Stack:\n    """Last in, first out."""\n\n    def __init__(self',
            "preview": {
                "setting": "sampled",
                "num_speculative_tokens": 5,
            },  # of the text that is shown
            "run_settings": ("sampled", "greedy"),
            "settings": {
                "sampled": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
                "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            },
            "num_speculative_tokens": (2, 4, 5, 6, 8),
            "ngram": {"num_speculative_tokens": 0, "max_ngram": 3, "min_ngram": 1},  # K = 0: off
            "time_rounds": False,
            "data": {"train": ("stdlib",), "held_out": (), "field": "text", "separator": ""},
            "texts": (),
            "prompts": 4,
            "prompt_tokens": 100,
            "max_new_tokens": 128,
            "repetitions": 3,
            "seed": 0,
        }
    )
