r"""Trains drafts that differ in a few things, and sets them side by side.

python scripts/compare_drafts.py --config=configs/experiments/distillspec.py \
    --workdir=runs/distillspec

The same command goes on with a comparison that was stopped.
"""

import pathlib
import runpy

from absl import flags
from ml_collections import ConfigDict, config_flags

from spsjax import cli, recipes

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compare.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the runs are kept.")
flags.mark_flag_as_required("workdir")


def main():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    print(config)
    base = runpy.run_path(str(_CONFIGS / f"{config.config}.py"))["get_config"]()
    base.cache = str(workdir / "cache")
    base.update(config.common)
    runs = dict(config.runs)
    start = ""
    if config.start:
        train("start", changed(base, config.start), workdir)
        start = str(workdir / "start" / "model")
    for name, changes in runs.items():
        train(name, changed(base, changes, init=start), workdir)


def changed(base: ConfigDict, changes: ConfigDict, **more) -> ConfigDict:
    """A copy of a config with some values replaced."""
    config = base.copy_and_resolve_references()
    config.update(changes)
    config.update(more)
    return config


def train(name: str, config: ConfigDict, workdir: pathlib.Path) -> None:
    print(f"== {name}", flush=True)
    recipes.draft(config, workdir / name, cli.mesh(config.mesh))


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "distillspec.py", saves=True)
