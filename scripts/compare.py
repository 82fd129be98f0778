r"""Compares drafters, rules of verification, trained drafts or weights on the same prompts.

python scripts/compare.py --workdir=runs/drafters \
    --drafters=model=pystdlib/draft,EAGLE-1=runs/eagle/drafter,EAGLE-3=runs/eagle3/drafter
python scripts/compare.py --config=configs/experiments/compare_verifiers.py --workdir=runs/verifiers
python scripts/compare.py --config=configs/experiments/distillspec.py --workdir=runs/distillspec
python scripts/compare.py --config=configs/experiments/compare_weights.py --workdir=runs/int8

`compare` in the config says what is compared:

- "drafters" of one target, as chains and as trees: whatever `spsjax.load_drafter` takes, in every
  shape of the config that it can draft. `--trees=EAGLE-1=runs/tree.json` adds a tree of its own,
  from plan.py, and `--verifiers=Medusa=typical` runs all its drafts by another rule, too.
  `--config.run_tasks="('stdlib', 'edit')"` takes the prompts of tasks, with rows per task.
- "verifiers": every rule that fits a chain, a tree without and with replacement, a dynamic tree.
- "drafts" that are trained with configs that differ in a few values.
- "weights": a target and the same target in int8. The loss is in nats per token of held-out texts;
  "accepted" is the rate at which the target, as it is, accepts what the one in int8 drafts.

The table is in `table.md`, its figures in `table.json`, a plot in `table.png`. The column "texts"
says whether greedy texts equal those of plain decoding. For sampled texts it has the standard score
of their surprise for the target over that of its own samples: about 0 for a lossless rule. The same
command resumes an interrupted comparison of verifiers or drafts. Every key of the config is a flag.
"""

import importlib
import pathlib

import _environment  # must be first: names a package that is missing
from absl import flags
from ml_collections import config_flags

from spsjax.cli import configs, main
from spsjax.errors import InputError

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compare.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name, folder or GGUF file of the draft model.")
_DRAFTERS = flags.DEFINE_list("drafters", [], "Drafters, as NAME=FOLDER.")
_TREES = flags.DEFINE_list("trees", [], "Trees of single drafters, as NAME=FILE.")
_VERIFIERS = flags.DEFINE_list("verifiers", [], "Further rules of drafters, as NAME=RULE.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.")
main.require("workdir")

# The flags that each comparison takes.
FLAGS = {
    "drafters": ("target", "drafters", "trees", "verifiers"),
    "verifiers": ("target", "draft"),
    "drafts": (),
    "weights": ("target",),
}


def run():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    kind = main.kind_of("compare", config, FLAGS)
    main.check_folder(workdir)
    more = ()
    if kind == "drafts":
        more = (_environment.EXPERIMENTS,)
    else:
        main.check_one_process()
        if kind == "verifiers":
            configs.choose_pair(config, _TARGET.value, _DRAFT.value, models=True)
        config.target = _TARGET.value or config.target
    if kind == "drafters":
        more = _DRAFTERS.value, _TREES.value, _VERIFIERS.value
        if not _DRAFTERS.value:
            raise InputError("--drafters: expected a value, found none")
    comparison = importlib.import_module(f"spsjax.cli.measurements.{kind}")
    print(f"\n{comparison.run(config, workdir, *more)}\n{workdir / 'table.md'}, table.png")


if __name__ == "__main__":
    others = {
        "compare=verifiers": _environment.EXPERIMENTS / "compare_verifiers.py",
        "compare=drafts": _environment.EXPERIMENTS / "distillspec.py",
        "compare=weights": _environment.EXPERIMENTS / "compare_weights.py",
    }
    default = _environment.EXPERIMENTS / "compare_drafters.py"
    main.run(run, default, saves=True, free=("common", "start", "runs"), others=others)
