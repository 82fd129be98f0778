"""Latency under load: plain decoding, fixed numbers of draft tokens, K chosen in every round.

python scripts/benchmark_load.py --workdir=runs/load

Hardware: any; meant for a machine with nothing else running.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the pair, the engine's sizes, and the loads."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "quantize": config_dict.placeholder(str),  # the target: int8, int8_dynamic
            "mesh": {"data": 1, "model": 1},  # devices; model = 0: all that there are
            "num_speculative_tokens": ("0", "2", "4", "auto"),  # K of each engine; 0: plain
            "rows": 8,  # requests that run at the same time
            "slots": 384,  # tokens of each
            "rounds": 4,  # of a run of the loop
            "rates": (0.5, 1.0, 2.0, 4.0),  # requests per second, of a Poisson process
            "clients": (),  # numbers of clients that wait for each answer before they ask again
            "requests": 40,  # of each load
            "repetitions": 1,  # of each load, with other arrivals
            # Prompts are the beginnings of held-out documents of these sources.
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "texts": (),  # or these texts as prompts, for a target with a tokenizer
            "prompts": 8,  # of each length
            "prompt_lengths": (32, 128),
            "max_new_tokens": 128,  # a request wants between a quarter of it and all
            # With --simulated: lower bounds of Chinchilla 70B and its 4B draft on 16 v5p chips with
            # 2,048 slots (docs/pods.md: memory, and for each token compute and links), 10 us for
            # each collective; and rates of acceptance by depth.
            "floors": {
                "target_pass": 2.93 + 162 * 0.01,
                "target_row": 0.182,
                "target_token": 0.026,
                "draft_step": 0.174 + 18 * 0.01,
                "draft_row": 0.016,
                "read_token": 0.026,
            },
            "acceptance": (0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8),
            "sampling": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
            "seed": 0,
        }
    )
