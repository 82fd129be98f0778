"""GPT-2 XL with GPT-2 small as its draft: 256 tokens after a prompt of 10, greedy, K = 4.

python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py \\
    --target=hf://openai-community/gpt2-xl --draft=hf://openai-community/gpt2
python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --target=FOLDER --draft=FOLDER
python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --random   # times alone

The setting is that of toyllm (MIT, github.com/ai-glimpse/toyllm), whose article reports 16.82 s ->
7.90 s (2.1 times as fast, r' = 0.8125). The report says whether the text equals that of plain
decoding, and which speed-up the cost breakdown predicts. With random weights the draft is never
accepted, so the report has the times alone.
Hardware: any with 7 GB of memory, in float32.
Figures, on two CPU cores with --random, 64 new tokens and one repetition: a pass of the target
takes 299 ms, a draft step 23 ms, and a round 630 ms (docs/models.md).
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the pair, the prompt, and the number of repetitions."""
    return ml_collections.ConfigDict(
        {
            "target": "gpt2:xl",  # a shape of configs/models, for --random only
            "draft": "gpt2:small",
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "quantize": config_dict.placeholder(str),  # the target: int8, int8_dynamic
            "mesh": {"data": 1, "model": 1, "slots": 1},  # devices; model = 0: all that there are
            "run_settings": ("greedy",),
            "settings": {
                "sampled": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
                "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            },
            "num_speculative_tokens": (4,),
            "tree": "",  # file that plan_tree.py wrote: trees beside the chains
            "verifier": "",  # one of spsjax.verifiers.NAMES; empty: what suits the drafter
            "ngram": {"num_speculative_tokens": 0, "max_ngram": 3, "min_ngram": 1},  # K = 0: off
            "forced_acceptance": config_dict.placeholder(float),  # for times alone, with --random
            "router_skew": 0.0,  # with --random: of a mixture, towards its first experts
            "time_rounds": True,
            "data": {
                "train": ("stdlib",),
                "held_out": (),
                "field": "text",
                "separator": "",
                "exclude": (),
            },
            "texts": ("Alan Turing theorized that computers would one day become",),
            "prompts": 1,  # of random tokens, with --random
            "prompt_tokens": 10,
            "max_new_tokens": 256,
            "repetitions": 2,
            "seed": 0,
            "peer": {"num_speculative_tokens": (4,), "dtypes": ("float32",)},
        }
    )
