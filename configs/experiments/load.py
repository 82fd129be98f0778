r"""Latency under load: plain decoding, fixed numbers of draft tokens, K chosen in every round.

python scripts/benchmark.py --config=configs/experiments/load.py --workdir=runs/load
python scripts/benchmark.py --config=configs/experiments/load.py --workdir=runs/load \
    --config.rates="()" --config.clients="(1,4,8)"
python scripts/benchmark.py --config=configs/experiments/load.py --workdir=runs/load \
    --config.num_speculative_tokens="('0','4','auto','confidence')"
python scripts/benchmark.py --config=configs/experiments/load.py --workdir=runs/load70b \
    --config.simulated=True --config.rows=64 --config.rates="(1.0,10.0,30.0,60.0)" \
    --config.requests=400

Arrivals are a Poisson process of each rate; with `clients`, each client asks again as soon as it is
answered.
Hardware: any; meant for an idle machine.
"""

from spsjax.cli import sections

get_config = sections.config(
    benchmark="load",
    **sections.pair(),
    **sections.quantize(),
    **sections.mesh(),
    num_speculative_tokens=("0", "2", "4", "auto"),  # K of each engine; 0: plain
    rows=8,  # requests that run at the same time
    slots=384,  # tokens of each
    rounds=4,  # of a run of the loop
    rates=(0.5, 1.0, 2.0, 4.0),  # requests per second, of a Poisson process
    clients=(),  # numbers of clients that wait for each answer before they ask again
    requests=40,  # of each load
    repetitions=1,  # of each load, with other arrivals
    **sections.prompts(),  # a request wants between a quarter of the new tokens and all
    prompt_lengths=(32, 128),  # each of all prompts; `prompt_tokens` is not used
    simulated=False,  # whether nothing runs, and rounds take as long as the floors
    # With `simulated`: lower bounds of Chinchilla 70B and its 4B draft on 16 v5p chips with
    # 2,048 slots (docs/archive/0.1_tpu_compiler.md: memory, and for each token compute and links),
    # 10 us for each collective; and rates of acceptance by depth.
    floors={
        "target_pass": 2.93 + 162 * 0.01,
        "target_row": 0.182,
        "target_token": 0.026,
        "draft_step": 0.174 + 18 * 0.01,
        "draft_row": 0.016,
        "read_token": 0.026,
    },
    acceptance=(0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8),
    sampling=sections.sampling(0.8, 0.95),
)
