r"""The shipped target, trained further to write passages again without their typos.

python scripts/make_edits.py --output=runs/edits.jsonl
python scripts/train_target.py --config=configs/experiments/edit_target.py --workdir=runs/edit
python scripts/compare_drafters.py --target=runs/edit/model --workdir=runs/edited \
    --config.task=edit --drafters=copy=copy,n-gram=ngram,suffix=suffix

Hardware: any; meant for two CPU cores.
"""

import pathlib
import runpy

import ml_collections

_BASE = pathlib.Path(__file__).with_name("pystdlib_target.py")


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `pystdlib_target.py` with other texts."""
    config = runpy.run_path(str(_BASE))["get_config"]()
    config.update(
        {
            "init": "pystdlib/target",
            "data": {"train": ("runs/edits.jsonl",)},
            "compute": {"dtype": "bfloat16"},
            "steps": 1500,
            "optimization": {"warmup": 50},
            "eval_every": 250,
        }
    )
    return config
