r"""Distillation of the 4B draft of Chen et al. 2023 (arXiv 2302.01318) from Chinchilla 70B.

python scripts/train.py --config=configs/experiments/chinchilla_draft.py \
    --config.target=/mnt/runs/chinchilla/model --config.data.train="('/mnt/text/**/*.jsonl.gz',)" \
    --workdir=/mnt/runs/chinchilla_draft --distributed

The paper's draft was trained on text, with Chinchilla's tokenizer and data. The paper does not
state its learning rate and number of tokens. This config distills the draft instead, with
Chinchilla's choices of optimization and a learning rate for the draft's size.
Hardware: meant for 256 chips (a mesh of 16 x 16). It has not been run, so no time is known.
"""

from spsjax.cli import sections

_SHAPE = sections.names_of(__file__, "../models/chinchilla_draft_4b.py")["get_config"]().to_dict()
_TARGET = sections.names_of(__file__, "chinchilla_target.py")

get_config = sections.training(
    "draft",
    # Vocabulary and context are taken from the target.
    model={key: _SHAPE[key] for key in _SHAPE if key not in ("vocab_size", "max_positions")},
    target_cache={"store": "nothing"},
    batch=768,
    steps=50_000,
    optimization=_TARGET["OPTIMIZATION"] | {"learning_rate": 2e-4, "accumulate": 6},
    **_TARGET["POD"],
)
