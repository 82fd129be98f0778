r"""Long contexts and large batches: which way to draft pays, on which devices.

python scripts/plan.py --config=configs/experiments/plan_context.py --workdir=runs/context
python scripts/plan.py --config=configs/experiments/plan_context.py --workdir=runs/context \
    --config.measure=True

Hardware: any; devices of the map need not be there. With `measure`, the model of `measured` is
timed on this machine: a few minutes on two CPU cores (under 3 for four of the points, with two
repetitions and 20 new tokens).
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

get_config = sections.config(
    plan="context",
    target="llama:3.1-8b",
    draft="llama:3.2-1b",
    # Kinds and numbers of devices; a TPU7x chip counts as two.
    devices=("v5e:8", "v5p:4", "v6e:4", "tpu7x:4", "H200:1"),
    batches=(1, 4, 16, 64, 256),
    contexts=(1024, 4096, 16_384, 32_768, 65_536, 131_072),
    slots=512,  # slots of small caches
    # Assumed rates of a draft model, a draft model with a small cache, and the target with
    # a small cache.
    acceptance={"model": 0.75, "window": 0.7, "sparse_self": 0.85},
    most_tokens=8,  # maximum K
    collective_us=1.0,  # assumed latency per all-reduce; its bytes take further time
    measure=False,  # whether the model of `measured` is timed on this machine
    measured={
        "shape": sizes(4, 512, 1280, 8, 8, vocab_size=4096, max_positions=65_536),
        # Batch and context per point.
        "points": ((8, 2048), (8, 8192), (8, 32_768), (32, 2048), (32, 8192)),
        "slots": 256,
        "num_speculative_tokens": 4,
        "acceptance": 0.85,
        "new_tokens": 32,
        "repetitions": 3,
    },
)
