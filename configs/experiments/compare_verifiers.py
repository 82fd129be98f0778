"""All rules of verification on chains and trees of the shipped draft.

C=configs/experiments/compare_verifiers.py
python scripts/compare.py --config=$C --workdir=runs/verifiers
python scripts/compare.py --config=$C --workdir=runs/verifiers --config.timed=False  # without times

Hardware: any; meant for an idle machine.
"""

from spsjax.cli import sections

get_config = sections.config(
    compare="verifiers",
    **sections.pair(),
    **sections.mesh(),
    **sections.settings("sampled", "nucleus", "cold", "greedy"),
    num_nodes=(4, 8, 16, 32, 64),  # draft tokens per round
    levels=4,  # of trees
    longest_chain=16,
    most_children=8,
    planned_for="nucleus",  # the setting for which the shapes of trees are best
    timed=True,  # also run the loop by every rule: time per token, and the test of laws
    **sections.prompts(),
)
