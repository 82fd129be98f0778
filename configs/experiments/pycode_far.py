r"""Training of a target that reads far: `pycode/target` on texts of 8,192 tokens.

python -m pip install --no-deps --no-compile --target=runs/packages \
    -r configs/experiments/pycode_packages.txt
python scripts/train.py --config=configs/experiments/pycode_far.py --workdir=runs/far

The shipped target was trained with 512 tokens. Its rotary positions turn more slowly here: with a
base of a million instead of ten thousand it reads 8,192 tokens at 2.2 nats per token before any
step. (With 175,000, the base of NTK-aware scaling to 16 times the length, it does so only up to
3,000 tokens.) Text is that of `pycode_target.py`: files follow each other package by package, so
that a name may have been defined thousands of tokens before. docs/archive/0.1_xeon_amx.md
has its figures.

Hardware: any. Attention takes most of the time.
"""

from spsjax.cli import sections

get_config = sections.changed(
    __file__,
    "pycode_target.py",
    init="pycode/target",
    model={"max_positions": 8192, "rope_theta": 1e6},
    length=8192,
    batch=1,
    steps=30,
    optimization={"learning_rate": 1e-4, "warmup": 5, "final_rate": 0.1, "weight_decay": 0.0},
    eval_every=15,
    eval_examples=8,
    log_every=1,
)
