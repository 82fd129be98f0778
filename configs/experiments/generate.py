"""Continuation of a text by the shipped pair, with speculative sampling at K = 4.

python scripts/generate.py --prompt="def read_json(path):" --show
python scripts/generate.py --file=some.py --config.sampling.temperature=0
python scripts/generate.py --prompt="import os" --config.drafter=ngram
python scripts/generate.py --prompt="import os" --config.drafter=none --json

Hardware: any; meant for a laptop's CPU.
Figures, on two cores of an AMD EPYC (Zen 4) at temperature 0.8 and top-p 0.95: 2.58 ms per token at
K = 4, and 4.71 without a drafter (docs/archive/0.1_epyc_zen4_float32.md).
"""

from ml_collections import config_dict

from spsjax.cli import sections

get_config = sections.config(
    **sections.pair(),
    **sections.quantize(),
    **sections.mesh(slots=1),
    drafter="model",  # none, model, or a module of spsjax.drafters
    # A number; auto: chosen in every round; None: the drafter's own.
    num_speculative_tokens=config_dict.placeholder(str),
    tree="",  # file that plan.py wrote: the draft model drafts trees
    stop_rule="",  # "entropy", "confidence:0.4", "adaptive-entropy": ends chains early
    verifier="",  # one of spsjax.verifiers.NAMES; empty: what suits the drafter
    **sections.drafters(),
    sampling=sections.sampling(0.8, 0.95),
    max_new_tokens=128,
    stop_at_eos=True,
    lenience=1.0,  # below 1: faster, but not the target's distribution
    seed=0,
    # With --answers, which writes texts to train on.
    answers={
        "samples": 1,  # conversations per line of the questions
        "rows": 8,  # most answers that are written at the same time
        "slots": 2048,  # tokens of a conversation; longer ones are left out or cut
        "parts": 1,  # processes that share the questions, each with a file of its own
        "part": 0,  # number of this process, from 0
    },
)
