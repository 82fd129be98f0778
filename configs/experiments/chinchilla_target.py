r"""Training of Chinchilla 70B as in Hoffmann et al. 2022 (arXiv 2203.15556).

python scripts/train.py --config=configs/experiments/chinchilla_target.py \
    --config.data.train="('/mnt/text/**/*.jsonl.gz',)" --workdir=/mnt/runs/chinchilla --distributed

Published: 1.4T tokens, 3M tokens per batch (1.5M in the first half), length 2,048, AdamW, a
learning rate of 1e-4 that falls by a cosine to a tenth, bfloat16 with float32 weights in the
optimizer.
From Gopher (Rae et al. 2021, arXiv 2112.11446): 1,500 warm-up steps, gradients clipped to a norm of
1. Our own choice, because neither paper states them: the weight decay and Adam's betas.
Hardware: meant for 256 chips (a mesh of 16 x 16). It has not been run, so no time is known.
"""

from spsjax.cli import sections

# The draft has these, too.
OPTIMIZATION = {"warmup": 1500, "final_rate": 0.1, "weight_decay": 0.1}
POD = {
    "length": 2048,
    "compute": {"dtype": "bfloat16", "remat": True},
    "mesh": {"data": 16, "model": 16},
    "eval_examples": 1024,
}

get_config = sections.training(
    "target",
    model=sections.names_of(__file__, "../models/chinchilla_70b.py")["get_config"](),
    batch=1536,
    steps=445_000,
    optimization=OPTIMIZATION | {"learning_rate": 1e-4, "accumulate": 12},
    **POD,
)
