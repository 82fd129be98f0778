r"""The shipped target, trained further to write passages again without their typos.

python -c "from spsjax.benchmarks.tasks import edit; edit.write_training_texts(
    'runs/edits.jsonl', characters=160, shuffled=True)"
python scripts/train.py --config=configs/experiments/edit_target.py --workdir=runs/edit
python scripts/compare.py --target=runs/edit/model --workdir=runs/edited \
    --config.run_tasks="('edit',)" --config.tasks.edit.characters=160 --config.stop_at_eos=True \
    --drafters=copy=copy,n-gram=ngram,suffix=suffix

Half of the texts are passages of shuffled words, which can only be copied. Copying is learned after
about 1,000 steps on passages of 160 characters, and was not after 500 on passages of 500.
Hardware: any; meant for two CPU cores.
Figures: 2.51 nats per token on held-out texts; 2.24 after a second stage.
"""

from spsjax.cli import sections

get_config = sections.changed(
    __file__,
    "pystdlib_target.py",
    init="pystdlib/target",
    data={"train": ("runs/edits.jsonl",)},
    compute={"dtype": "bfloat16"},
    steps=3000,
    optimization={"warmup": 50, "b2": 0.98},
    eval_every=250,
)
