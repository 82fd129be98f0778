r"""Gemma 4 (Google 2026), the language models: `gemma4:31b`.

python scripts/compile.py --topology=v5p:2x2x2 --config=configs/experiments/chinchilla_70b.py \
    --config.target=gemma4:31b --config.draft=gemma:3-1b

Sizes: 31b and 26b-a4b. Every sixth layer has full attention, with fewer and wider heads whose keys
are their values. 26b-a4b has experts beside a feed-forward network of all tokens.
Hardware: any with memory for the weights; the command needs a CPU and libtpu. Not measured.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes


def _full(groups: int) -> tuple:
    """Returns the changes of a cycle of layers, whose last one has full attention."""
    own = ("head_dim", 512), ("num_kv_heads", groups), ("value_is_key", True)
    return (*[()] * 5, own)


_EXPERTS = {"num_experts": 128, "experts_per_token": 8, "shared_d_ff": 2112, "router": "scaled"}
SIZES = {
    "31b": sizes(60, 5376, 21_504, 32, 16, 256) | {"changes": _full(4)},
    "26b-a4b": sizes(30, 2816, 704, 16, 8, 256) | {"changes": _full(2)} | _EXPERTS,
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(
    SIZES,
    vocab_size=262_144,
    max_positions=262_144,
    windows=(1024,) * 5 + (0,),
    ffn="geglu",
    post_norms=True,
    qk_norm=True,
    value_norm=True,
    output_scale=True,
    embed_scale=True,
    query_scale=1.0,
    rope_theta=1e6,
    rope_theta_local=10_000.0,
    rope_scaling=("proportional", 0.25, 1.0),
    logit_softcap=30.0,
    norm_eps=1e-6,
)
