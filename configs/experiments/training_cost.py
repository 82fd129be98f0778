r"""What a training token costs, by drafter, beside the first one.

python scripts/benchmark.py --config=configs/experiments/training_cost.py --workdir=runs/cost
python scripts/benchmark.py --config=configs/experiments/training_cost.py --workdir=runs/cost \
    --target=smollm2 --config.changes.batch=16 --config.changes.length=1024

Each drafter is trained as its file in configs/drafters says, with `changes`, for a few steps on one
batch. Trainings take turns.
Hardware: an accelerator, or a CPU with time: 6 minutes on two cores.
"""

from spsjax.cli import sections

get_config = sections.config(
    benchmark="training",
    target="pystdlib/target",
    # Files in configs/drafters. The times of the others are divided by those of the first.
    drafters=("eagle3", "eagle", "medusa", "mlp_speculator", "dflash", "dflash2", "dspark"),
    # Keys of the trainings' configs. The target runs in every step.
    changes={"batch": 2, "length": 512, "target_cache": {"store": "nothing"}},
    repetitions=5,  # turns
    steps=2,  # of a training in each turn
)
