r"""Training of a better target: 18.6M parameters, on the standard library and 95 packages.

python -m pip install --no-deps --no-compile --target=runs/packages \
    -r configs/experiments/pycode_packages.txt
python scripts/train.py --config=configs/experiments/pycode_target.py --workdir=runs/target

Ten times the text of `pystdlib_target.py`: 20.5 of 64 million tokens. The packages have
licences of the kinds MIT, BSD, Apache and PSF; pycode_packages.txt has their versions.

The first part of a training can be that of a shallow model, which reads more text in the same time:

    --config.model.num_layers=2 --config.steps=6000 --config.optimization.final_rate=1 \
        --workdir=runs/shallow
    --config.init=runs/shallow/model --workdir=runs/target

Hardware: any. On two CPU cores with AVX-512 BF16 (AMD EPYC, Zen 4) and JAX 0.12 the tokenizer and
the tokens take 5 minutes, six layers read 1,350 tokens per second and two 3,300: a night. On one
NVIDIA H200 with `--config.batch=64` six layers read 1.49 million, 20% of its peak.
Figures: `pycode/target` was trained so on an H200, for 58.5 million tokens in two and a half
minutes, and has 1.95 nats per token on held-out files (spsjax/pretrained/pycode/README.md has the
command).
"""

from spsjax.cli import sections

get_config = sections.changed(
    __file__,
    "pystdlib_target.py",
    data={
        "train": ("stdlib", "runs/packages/**/*.py"),
        # Tests repeat each other, and copies of other packages are read twice.
        "exclude": ("*/tests/*", "*/test/*", "*/test_*", "*/_vendor/*"),
    },
    compute={"dtype": "bfloat16"},
    steps=20_000,
    optimization={"warmup": 500, "final_rate": 0.05},
    eval_every=1000,
    eval_examples=128,
)
