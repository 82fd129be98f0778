"""The best tree of draft tokens for a pair, a sampling setting and this machine.

python scripts/plan.py --config=configs/experiments/plan_tree.py --workdir=runs/plan
python scripts/generate.py --config.tree=runs/plan/tree.json --prompt="import os" --show
python scripts/benchmark.py --config.tree=runs/plan/tree.json

Hardware: any; costs are measured where it runs. Time: a minute on two cores of an AMD EPYC (Zen 3).
"""

from spsjax.cli import sections

get_config = sections.config(
    plan="tree",
    **sections.pair(),
    **sections.mesh(),
    sampling=sections.sampling(0.8, 0.95),
    num_nodes=(2, 4, 8, 16, 32, 64),  # draft tokens of the trees
    most_children=8,
    most_levels=16,
    **sections.prompts(),
    repetitions=5,  # timings per pass
)
