r"""MLP speculator for the shipped target: a recurrent network on the last state.

python scripts/train.py --config=configs/drafters/mlp_speculator.py --workdir=runs/mlp

The network is that of Wertheimer et al. 2024 (arXiv 2404.19124). Their second stage goes on with
texts that the target writes after short prompts, at a tenth of the learning rate:

python scripts/train.py --config=configs/drafters/mlp_speculator.py --workdir=runs/mlp2 \
    --config.init=runs/mlp/drafter --config.mixture.target=1 --config.mixture.corpus=0 \
    --config.optimization.learning_rate=1e-4
Hardware: any.
"""

from spsjax.cli import sections

get_config = sections.training(
    "features",
    drafter={
        "method": "mlp_speculator",
        "num_steps": 4,
        "width": 512,
        "tied": True,
        "scale_input": True,
    },
    target_cache={"store": "nothing"},
    objective={"steps": 4},
)
