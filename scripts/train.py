r"""Trains what a config describes: a target, a draft model, a drafter of features, or a stop rule.

python scripts/train.py --config=configs/experiments/pystdlib_target.py --workdir=runs/target
python scripts/train.py --config=configs/experiments/pystdlib_draft.py --workdir=runs/draft \
    --config.target=runs/target/model
python scripts/train.py --config=configs/drafters/eagle3.py --workdir=runs/eagle3
python scripts/train.py --config=configs/experiments/stop_rule.py --workdir=runs/disco

The same command resumes an interrupted run.
"""

import _environment  # noqa: F401 (must be first: names a package that is missing)
from absl import flags
from ml_collections import config_flags

from spsjax.cli import configs, main
from spsjax.training import fit

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_EXPORT = flags.DEFINE_string(
    "export",
    None,
    "Export this checkpoint, a step or best, as the run's result without more training.",
)
main.require("config", "workdir")


def run():
    config = _CONFIG.value
    if "draft" in config:
        configs.choose_pair(config, weights=True)
    mesh = configs.mesh(config.mesh) if "mesh" in config else None
    fit.train(config, _WORKDIR.value, mesh, _EXPORT.value)


if __name__ == "__main__":
    main.run(run, saves=True)
