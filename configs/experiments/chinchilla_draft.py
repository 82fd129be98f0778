r"""Distillation of the 4B draft of Chen et al. 2023 (arXiv 2302.01318) from Chinchilla 70B.

python scripts/train.py --config=configs/experiments/chinchilla_draft.py \
    --config.target=/mnt/runs/chinchilla/model --config.data.train="('/mnt/text/**/*.jsonl.gz',)" \
    --workdir=/mnt/runs/chinchilla_draft --distributed

The paper's draft was trained on text, with Chinchilla's tokenizer and data. The paper does not
state its learning rate and number of tokens. This config distills the draft instead, with
Chinchilla's choices of optimization and a learning rate for the draft's size.
Hardware: meant for 256 chips (a mesh of 16 x 16). It has not been run, so no time is known.
"""

import pathlib
import runpy

from spsjax.training import config

_MODEL = pathlib.Path(__file__).parents[1] / "models" / "chinchilla_draft_4b.py"


def get_config():
    """Returns the options of the training, a `config.DraftConfig`."""
    shape = runpy.run_path(str(_MODEL))["get_config"]()
    for field in ("vocab_size", "max_positions"):  # taken from the target
        del shape[field]
    return config.default(
        config.DraftConfig,
        model=shape,
        target_cache={"store": "nothing"},
        length=2048,
        batch=768,
        steps=50_000,
        optimization={
            "learning_rate": 2e-4,
            "warmup": 1500,
            "final_rate": 0.1,
            "weight_decay": 0.1,
            "accumulate": 6,
        },
        compute={"dtype": "bfloat16", "remat": True},
        mesh={"data": 16, "model": 16},
        eval_examples=1024,
    )
