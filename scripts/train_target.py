"""Trains a language model, and its tokenizer, on a corpus: Python's standard library, or yours.

python scripts/train_target.py --workdir=runs/target
python scripts/train_target.py --workdir=runs/mine --config.data.train="('books/*.txt.gz',)"

The same command goes on with a run that was stopped.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from spsjax.cli import main as cli
from spsjax.training import recipes

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept.")
_EXPORT = flags.DEFINE_string(
    "export", None, "Make this checkpoint of the run its model, and train no more: a step, or best."
)
flags.mark_flag_as_required("workdir")


def main():
    config = _CONFIG.value
    print(cli.shown(config))
    recipes.target(config, _WORKDIR.value, cli.mesh(config.mesh), _EXPORT.value)


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "pystdlib_target.py", saves=True)
