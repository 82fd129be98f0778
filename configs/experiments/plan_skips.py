"""Sub-layers that the shipped target can leave out when it drafts for itself.

python scripts/plan_skips.py --output=runs/skips.json
python scripts/plan_skips.py --target=runs/layer_skip/model --output=runs/skips.json

Hardware: any.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the target, the sampling parameters and the texts that it writes."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "mesh": {"data": 1, "model": 1},  # devices; model = 0: all that there are
            "sampling": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
            "most_tokens": 8,  # greatest K
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
