r"""Training of a tiny target: 0.5M parameters, on four packages of Python's standard library.

python scripts/train.py --config=configs/experiments/tiny_target.py \
    --workdir=runs/tiny/target

It is too small to be useful, and shows in a minute what a training does. `tiny_draft.py` follows.
Hardware: any. Time: 76 s on two shared cores of an AMD EPYC (Zen 3) virtual machine.
Figures there, Python 3.11: 3.61 nats per token on held-out files.
"""

import pathlib
import sysconfig

from spsjax.cli import sections

PACKAGES = "email", "http", "json", "logging"
TEXTS = {  # the draft has them, too
    "data": {
        "train": tuple(
            str(pathlib.Path(sysconfig.get_path("stdlib")) / package / "*.py")
            for package in PACKAGES
        )
    },
    "length": 64,
    "batch": 16,
    "steps": 300,
    "eval_every": 100,
    "eval_examples": 32,
    "optimization": {"warmup": 20, "learning_rate": 4e-3},
}

get_config = sections.changed(
    __file__,
    "pystdlib_target.py",
    model={
        "vocab_size": 512,
        "d_model": 128,
        "d_ff": 256,
        "num_layers": 3,
        "head_dim": 16,
        "max_positions": 128,
    },
    **TEXTS,
)
