r"""Distillation of a tiny draft, 0.07M parameters, from the target of `tiny_target.py`.

python scripts/train.py --config=configs/experiments/tiny_draft.py --workdir=runs/tiny/draft

Hardware: any. Time: 59 s on two shared cores of an AMD EPYC (Zen 3) virtual machine.
Figures there on held-out text at temperature 1: acceptance 0.850, greedy agreement 0.734.
"""

import pathlib
import runpy

from spsjax.training import config

_TARGET = runpy.run_path(str(pathlib.Path(__file__).with_name("tiny_target.py")))


def get_config():
    """Returns the config of `pystdlib_draft.py` with changes; text and steps are the target's."""
    return config.derived(
        __file__,
        "pystdlib_draft.py",
        target="runs/tiny/target/model",
        model={"d_model": 64, "d_ff": 128, "head_dim": 8},
        objective={"name": "forward_kl", "temperatures": (1.0,)},
        target_cache={"store": "nothing"},
        draft_eval={"prompt_length": 16, "new_tokens": 48},
        **_TARGET["TEXTS"],
    )
