"""Speed of autoregressive and speculative sampling on held-out code, by K.

python scripts/benchmark.py --json=runs/benchmark.json --plot=runs/benchmark.png
python scripts/benchmark.py --config.run_settings=greedy --config.num_speculative_tokens=4   # quick
python scripts/benchmark.py --peer=hf --config.num_speculative_tokens=5 --config.prompts=4
python scripts/benchmark.py --size=90M

Hardware: any; meant for a CPU with nothing else running. Time: not measured.
Figures, on two cores of an AMD EPYC (Zen 4) with two prompts: at the best K of 4 and 8, speculative
sampling is 1.80 (sampled) and 2.26 (greedy) times as fast as autoregressive sampling
(docs/results.md).
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the pair, the sampling settings, and the number of prompts and repetitions."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "quantize": config_dict.placeholder(str),  # the target: int8, int8_dynamic
            "mesh": {"data": 1, "model": 1, "slots": 1},  # devices; model = 0: all that there are
            "run_settings": ("sampled", "greedy"),  # names of the settings to run
            "settings": {
                "sampled": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
                "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            },
            "num_speculative_tokens": (1, 2, 3, 4, 5, 6, 7, 8),
            "tree": "",  # file that plan_tree.py wrote: trees beside the chains
            "verifier": "",  # one of spsjax.verifiers.NAMES; empty: what suits the drafter
            "ngram": {"num_speculative_tokens": 4, "max_ngram": 3, "min_ngram": 1},  # K = 0: off
            "forced_acceptance": config_dict.placeholder(float),  # for times alone, with --random
            "router_skew": 0.0,  # with --random: of a mixture, towards its first experts
            "time_rounds": True,  # time a draft step and a scoring pass alone, too
            # Prompts are the beginnings of held-out documents of these sources.
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "texts": (),  # or these texts as prompts, for a target with a tokenizer
            "prompts": 8,
            "prompt_tokens": 100,
            "max_new_tokens": 128,
            "repetitions": 3,
            "seed": 0,
            "peer": {
                "num_speculative_tokens": (2, 4, 6),  # K of assisted generation
                "dtypes": ("float32", "bfloat16"),
            },
        }
    )
