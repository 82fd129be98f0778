"""Trains a drafter for a target on a corpus: a draft model, or a layer on the target's features.

python scripts/train_drafter.py --config.target=runs/target/model --workdir=runs/draft
python scripts/train_drafter.py --config=configs/experiments/tiny_draft.py --workdir=runs/tiny/draft
python scripts/train_drafter.py --config=configs/drafters/eagle3.py --workdir=runs/eagle3

The same command resumes an interrupted run.
"""

import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
from absl import flags
from ml_collections import config_flags

from spsjax.cli import configs, main
from spsjax.training import train_draft, train_head

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
_MODEL, _HEAD = _CONFIGS / "experiments" / "pystdlib_draft.py", _CONFIGS / "drafters" / "eagle.py"
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
    train = train_head.train_head if "drafter" in config else train_draft.distill_draft
    train(config, _WORKDIR.value, configs.mesh(config.mesh), _EXPORT.value)


if __name__ == "__main__":
    main.run(run, _MODEL, saves=True, free=["drafter"], others={"drafter": _HEAD})
