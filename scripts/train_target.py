r"""Trains a language model and its tokenizer on Python's standard library or on your own text.

python scripts/train_target.py --workdir=runs/target
python scripts/train_target.py --config=configs/experiments/tiny_target.py \
    --workdir=runs/tiny/target
python scripts/train_target.py --workdir=runs/mine --config.data.train="('books/*.txt.gz',)"

The same command resumes an interrupted run.
"""

import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
from absl import flags
from ml_collections import config_flags

from spsjax.cli import configs, main
from spsjax.training import train_target

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_EXPORT = flags.DEFINE_string(
    "export",
    None,
    "Export this checkpoint, a step or best, as the run's model without more training.",
)
main.require("workdir")


def run():
    config = _CONFIG.value
    train_target.train_target(config, _WORKDIR.value, configs.mesh(config.mesh), _EXPORT.value)


if __name__ == "__main__":
    main.run(run, _CONFIGS / "pystdlib_target.py", saves=True)
