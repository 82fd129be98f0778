r"""Training of a better target: 18.6M parameters, on the standard library and 95 packages.

python -m pip install --no-deps --no-compile --target=runs/packages \
    -r configs/experiments/pycode_packages.txt
python scripts/train_target.py --config=configs/experiments/pycode_target.py --workdir=runs/target

Ten times the text of `pystdlib_target.py`: 20.5 of about 60 million tokens. The packages have
licences of the kinds MIT, BSD, Apache and PSF; pycode_packages.txt has their versions.
Hardware: any; meant for two CPU cores and a night. It has not been run to its end, so neither time
nor figures are known.
"""

import pathlib
import runpy

import ml_collections

_BASE = pathlib.Path(__file__).with_name("pystdlib_target.py")


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `pystdlib_target.py` with more text and more steps."""
    config = runpy.run_path(str(_BASE))["get_config"]()
    config.update(
        {
            "data": {
                "train": ("stdlib", "runs/packages/**/*.py"),
                # Tests repeat each other, and copies of other packages are read twice.
                "exclude": ("*/tests/*", "*/test/*", "*/test_*", "*/_vendor/*"),
            },
            "steps": 20_000,
            "optimization": {"warmup": 500, "final_rate": 0.05},
            "eval_every": 1000,
            "eval_examples": 128,
        }
    )
    return config
