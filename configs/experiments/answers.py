r"""Answers of a target to questions, to train its drafter on: its own texts, without a draft.

python scripts/generate.py --config=configs/experiments/answers.py --target=FOLDER \
    --prompts=questions.jsonl.gz --answers=runs/answers
python scripts/train.py --config=configs/drafters/eagle3.py --config.target=FOLDER \
    --config.data.train="('runs/answers',)" --workdir=runs/eagle3

Hardware: an accelerator. Tokens per second are on the progress bar.
"""

from spsjax.cli import sections

get_config = sections.changed(
    __file__,
    "generate.py",
    drafter="none",  # model: faster, with --draft
    sampling=sections.sampling(1.0),  # the target's distribution, which the drafter is to learn
    max_new_tokens=512,
)
