"""A first look: one text by autoregressive and by speculative sampling, and their speed.

bash scripts/quickstart.sh    # or, in an environment that has spsjax: python scripts/quickstart.py

Hardware: any; meant for a laptop's CPU.
Time: 2 min 11 s on two cores of an AMD EPYC (Zen 4), the installation included.
Figures there: the best speed-up is 1.97 sampled (K = 5) and 2.14 greedy (K = 4). It varies between
hours, and was 1.79 and 1.90 in another run (docs/results.md).
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns a small `benchmark.py`, a trial and a prompt."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "prompt": 'class Stack:\n    """Last in, first out."""\n\n    def __init__(self',
            "preview": "sampled",  # setting of the text that is shown
            "run_settings": ("sampled", "greedy"),
            "settings": {
                "sampled": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
                "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            },
            "num_speculative_tokens": (2, 3, 4, 5, 6, 8, 10),  # of which a trial finds the fastest
            "trial_prompts": 2,
            "ngram": {"num_speculative_tokens": 0, "max_ngram": 3, "min_ngram": 1},  # K = 0: off
            "time_rounds": False,
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "texts": (),
            "prompts": 4,
            "prompt_tokens": 100,
            "max_new_tokens": 128,
            "repetitions": 3,
            "seed": 0,
        }
    )
