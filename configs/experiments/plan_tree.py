"""The best tree of draft tokens for a pair, a sampling setting and this machine.

python scripts/plan.py --config=configs/experiments/plan_tree.py --workdir=runs/plan
python scripts/generate.py --config.tree=runs/plan/tree.json --prompt="import os" --show
python scripts/benchmark.py --config.tree=runs/plan/tree.json

Hardware: any; costs are measured where it runs. Time: a minute on two cores of an AMD EPYC (Zen 3).
"""

import ml_collections

from spsjax.cli import sections


def get_config() -> ml_collections.ConfigDict:
    """Returns the pair, the sampling parameters, and the sizes of trees to plan."""
    return ml_collections.ConfigDict(
        {
            "plan": "tree",
            **sections.pair(),
            **sections.mesh(),
            "sampling": sections.sampling(0.8, 0.95),
            "num_nodes": (2, 4, 8, 16, 32, 64),  # draft tokens of the trees
            "most_children": 8,
            "most_levels": 16,
            **sections.prompts(),
            "repetitions": 5,  # timings per pass
        }
    )
