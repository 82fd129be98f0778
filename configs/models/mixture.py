r"""Mixtures of experts of no published model, small enough to time on a CPU, and a draft for them.

python scripts/benchmark.py --random --config.target=mixture:64 --config.draft=mixture:draft \
    --config.forced_acceptance=0.7 --config.num_speculative_tokens="(2,4,'auto')"

Sizes: 8 and 64 experts, of which each token uses 2 and 4; and the draft, which has none.
Hardware: any; 64 experts have 208M weights.
"""

from spsjax.cli import sections

SIZES = {
    "8": {"num_experts": 8, "experts_per_token": 2, "d_ff": 1024},
    "64": {"num_experts": 64, "experts_per_token": 4, "d_ff": 512},
    "draft": {"d_model": 256, "d_ff": 512, "num_layers": 1},
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(
    SIZES,
    vocab_size=4096,
    d_model=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    max_positions=1024,
)
