"""Distils a draft model from a target on a corpus.

python scripts/train_drafter.py --config.target=runs/target/model --workdir=runs/draft

The same command resumes a run that was stopped.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from spsjax.cli import main as cli
from spsjax.training import train_draft

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "Config of the run.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_EXPORT = flags.DEFINE_string(
    "export", None, "Step of a checkpoint to turn into the model instead of training, or 'best'."
)
flags.mark_flag_as_required("workdir")


def main():
    config = _CONFIG.value
    print(cli.shown(config))
    train_draft.distill_draft(config, _WORKDIR.value, cli.mesh(config.mesh), _EXPORT.value)


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "pystdlib_draft.py", saves=True)
