r"""Distillation of a tiny draft, 0.07M parameters, from the target of `tiny_target.py`.

python scripts/train.py --config=configs/experiments/tiny_draft.py --workdir=runs/tiny/draft

Hardware: any. Time: 59 s on two shared cores of an AMD EPYC (Zen 3) virtual machine.
Figures there on held-out text at temperature 1: acceptance 0.850, greedy agreement 0.734.
"""

from spsjax.cli import sections

get_config = sections.changed(
    __file__,
    "pystdlib_draft.py",
    target="runs/tiny/target/model",
    model={"d_model": 64, "d_ff": 128, "head_dim": 8},
    objective={"name": "forward_kl", "temperatures": (1.0,)},
    target_cache={"store": "nothing"},
    draft_eval={"prompt_length": 16, "new_tokens": 48},
    **sections.names_of(__file__, "tiny_target.py")["TEXTS"],
)
