"""Training of the shipped target: 18.6M parameters, on CPython's standard library.

python scripts/train.py --config=configs/experiments/pystdlib_target.py --workdir=runs/target

Hardware: any; meant for two CPU cores. Time: 61 minutes there, partly on a shared machine.
Figures: 4.04 nats per token on held-out files, and 4.01 in a second run
(docs/archive/0.1_epyc_zen4_float32.md).
"""

from spsjax.cli import sections

get_config = sections.training(
    "target",
    model={
        "vocab_size": 4096,
        "d_model": 512,
        "d_ff": 1280,
        "num_layers": 6,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 64,
        "max_positions": 512,
    },
    steps=2000,
    optimization={"warmup": 200, "final_rate": 0.1, "weight_decay": 0.1},
    eval_every=200,
)
