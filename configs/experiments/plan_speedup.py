r"""Speed-up over K by theory (theorem 3.8 of Leviathan et al. 2022, arXiv 2211.17192).

python scripts/plan.py --config.acceptance=0.8 --config.draft_ms=1.8 --config.target_ms=14.1
python scripts/plan.py --config.acceptance=0.9,0.85,0.8,0.8
python scripts/plan.py --config.report=runs/figure1/report.json --workdir=runs/plan
python scripts/plan.py --config.children=0.84,0.07,0.02 --config.draft_ms=0.4 \
    --config.target_ms=3.6 --config.row_ms=0.2

Hardware: none; nothing is run.
"""

from spsjax.cli import sections

# Those of Chen et al. 2023 (arXiv 2302.01318).
get_config = sections.config(
    plan="speedup",
    acceptance=(0.8,),  # one rate for all positions, or one rate per position
    draft_ms=1.8,  # per draft token
    target_ms=14.1,  # per pass of the target
    most_tokens=16,  # greatest K, if there is one rate
    # File that reproduce.py wrote: its rates and costs replace those above.
    report="",
    # Rates at which the children of a node are accepted, as a plan of a tree measures them:
    # trees of these sizes are planned.
    children=(),
    row_ms=0.0,  # per further token of the target's pass
    num_nodes=(2, 4, 8, 16, 32, 64),
)
