"""Speed of autoregressive and speculative sampling on held-out code, by K.

python scripts/benchmark.py --workdir=runs/benchmark
python scripts/benchmark.py --config.run_settings=greedy --config.num_speculative_tokens=4   # quick
python scripts/benchmark.py --peer=hf --config.num_speculative_tokens=5 --config.prompts=4
python scripts/benchmark.py --size=90M

Hardware: any; meant for an idle CPU. Time: not measured.
Figures, on two cores of an AMD EPYC (Zen 4) with two prompts: at the best K of 4 and 8, speculative
sampling is 1.80 (sampled) and 2.26 (greedy) times as fast as autoregressive sampling
(docs/archive/index.md).
"""

from ml_collections import config_dict

from spsjax.cli import sections

get_config = sections.config(
    benchmark="pair",
    **sections.pair(),
    **sections.quantize(),
    **sections.mesh(slots=1),
    **sections.settings("sampled", "greedy", sampled=sections.sampling(0.8, 0.95)),
    num_speculative_tokens=(1, 2, 3, 4, 5, 6, 7, 8),
    tree="",  # file of plan.py: trees in addition to the chains
    verifier="",  # one of spsjax.verifiers.NAMES; empty: what suits the drafter
    **sections.ngram(4),
    forced_acceptance=config_dict.placeholder(float),  # for times alone, with --random
    router_skew=0.0,  # with --random: of a mixture, towards its first experts
    time_rounds=True,  # time a draft step and a scoring pass alone, too
    **sections.prompts(),
    repetitions=3,
    **sections.peer(2, 4, 6, dtypes=("float32", "bfloat16")),
)
