"""Continuation of a text by the shipped pair, with speculative sampling at K = 4.

python scripts/generate.py --prompt="def read_json(path):" --show
python scripts/generate.py --file=some.py --config.sampling.temperature=0
python scripts/generate.py --prompt="import os" --config.drafter=ngram
python scripts/generate.py --prompt="import os" --config.drafter=none --json

Hardware: any; meant for a laptop's CPU.
Figures, on two cores of an AMD EPYC (Zen 4) at temperature 0.8 and top-p 0.95: 2.58 ms per token at
K = 4, and 4.71 without a drafter (docs/results.md).
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the pair, the drafter and the sampling parameters."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "quantize": config_dict.placeholder(str),  # the target: int8, int8_dynamic
            "mesh": {"data": 1, "model": 1, "slots": 1},  # devices; model = 0: all that there are
            "drafter": "model",  # none, model, or a module of spsjax.drafters
            # A number; auto: chosen in every round; None: the drafter's own.
            "num_speculative_tokens": config_dict.placeholder(str),
            "tree": "",  # file that plan_tree.py wrote: the draft model drafts trees
            "stop_rule": "",  # "entropy", "confidence:0.4", "adaptive-entropy": ends chains early
            "verifier": "",  # one of spsjax.verifiers.NAMES; empty: what suits the drafter
            "ngram": {"max_ngram": 3, "min_ngram": 1},
            "suffix": {"num_tree_tokens": 0, "max_match": 64, "factor": 1.0, "min_prob": 0.1},
            "copy": {
                # start: index of the first token; None: behind what the tokenizer adds.
                "start": config_dict.placeholder(int),
                "max_suffix": 3,
                "replaces": True,
            },
            "lookahead": {"window": 15, "num_guesses": 15, "pool": 1024, "follow": False},
            "sampling": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
            "max_new_tokens": 128,
            "stop_at_eos": True,
            "lenience": 1.0,  # below 1: faster, but not the target's distribution
            "seed": 0,
        }
    )
