r"""A rule that ends chains of the shipped draft early, trained on its rounds.

python scripts/train.py --config=configs/experiments/stop_rule.py --workdir=runs/disco
python scripts/train.py --config=configs/experiments/stop_rule.py --config.rule=specdec \
    --workdir=runs/specdec
python scripts/generate.py --config.num_speculative_tokens=8 \
    --config.stop_rule=runs/disco/rule.safetensors --prompt="import os" --show

Hardware: any.
"""

from spsjax.cli import sections

get_config = sections.config(
    **sections.pair(),  # the draft may be a draft model or EAGLE
    **sections.mesh(),
    rule="disco",  # or specdec
    rules={"disco": {"top": 10, "width": 64}, "specdec": {"least": 2, "blocks": 3}},
    num_speculative_tokens=16,  # K of the logged rounds, and the most that is chosen
    sampling=sections.sampling(0.8, 0.95),
    fit={"steps": 2000, "batch": 64, "learning_rate": 1e-3, "seed": 0},
    # A quarter of the prompts chooses the threshold, and is not trained on.
    **sections.prompts(24, new_tokens=256),
    repetitions=5,  # timings per cost
)
