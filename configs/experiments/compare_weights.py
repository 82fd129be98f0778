"""The shipped target with its matrices in int8, beside the one it is made of.

python scripts/compare_weights.py --output=runs/int8.json
python scripts/compare_weights.py --config.dtype=float32 --target=FOLDER --output=runs/int8.json

Hardware: any.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the target, the sampling parameters and the texts."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "mesh": {"data": 1, "model": 1},  # devices; model = 0: all that there are
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            "num_speculative_tokens": 4,  # when int8 drafts for its own model
            "rows": (1, 2, 5, 8, 16),  # tokens of the passes that are timed
            "repetitions": 9,  # of each time, of which the median counts
            # Texts are the beginnings of held-out documents of these sources.
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "texts": (),  # or these texts
            "prompts": 24,
            "prompt_tokens": 256,
            "max_new_tokens": 64,  # after the first half of each text
            "seed": 0,
        }
    )
