"""A rule that ends chains of the shipped draft early, trained on its rounds.

python scripts/train_stop_rule.py --output=runs/disco.safetensors
python scripts/train_stop_rule.py --config.rule=specdec --output=runs/specdec.safetensors

Hardware: any.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the pair, the rule, and how it is trained."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",  # a draft model, or EAGLE
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "mesh": {"data": 1, "model": 1},  # devices; model = 0: all that there are
            "rule": "disco",  # or specdec
            "rules": {"disco": {"top": 10, "width": 64}, "specdec": {"least": 2, "blocks": 3}},
            "num_speculative_tokens": 16,  # K of the logged rounds, and the most that is chosen
            "sampling": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
            "fit": {"steps": 2000, "batch": 64, "learning_rate": 1e-3, "seed": 0},
            # Prompts are the beginnings of held-out documents of these sources.
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "texts": (),  # or these texts as prompts
            "prompts": 24,  # a quarter of them chooses the threshold, and is not trained on
            "prompt_tokens": 100,
            "max_new_tokens": 256,
            "repetitions": 5,  # of the measured costs
            "seed": 0,
        }
    )
