"""Tests of what drafters state of their passes, by which `planning` bounds the time of a round."""

import math

import jax
import jax.numpy as jnp
import pytest
from helpers.models import tiny_config

from spsjax import drafters
from spsjax.drafters import base

TARGET = tiny_config(64, num_layers=4, d_model=32, d_ff=64, padded_vocab_size=96)
K, BLOCK, TAPS, RANK, GROUP = 5, 8, 3, 16, 8
D, F, KV = 32, 64, TARGET.num_kv_heads * TARGET.head_dim
Q = TARGET.num_heads * TARGET.head_dim
LAYER = 2 * D * Q + 2 * D * KV + 3 * D * F + 2 * D + 2 * TARGET.head_dim  # with norms
HEAD = D * 96  # the padding is multiplied, too


def passes_of(name: str, options: dict) -> dict[str, base.Pass]:
    drafter = drafters.methods_with("LAYOUT")[name].Drafter.from_config(options, TARGET)
    params = {"target": {"head": {"kernel": jax.ShapeDtypeStruct((D, 96), jnp.float32)}}}
    params["drafter"] = drafter.param_shapes(jnp.float32)
    return drafter.passes(params)


def num_weights(made: base.Pass) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.weights))


def block_options(**more) -> dict:
    sizes = {"num_layers": 2, "block_size": BLOCK, "tap_layers": (1, 2, 3)}
    return {**sizes, "num_speculative_tokens": K, **more}


@pytest.mark.parametrize(
    ("name", "options", "convolutions", "corrections"),
    [
        ("dflash", {}, 0, None),
        (
            "dflash2",
            {"selector_rank": RANK, "conv_group_size": GROUP},
            2 * (4 * D + D * 4 * D // GROUP),
            D * RANK,
        ),
        ("dspark", {"markov_rank": RANK}, 0, RANK * 96),
        ("dspark", {"markov_rank": RANK, "markov_kind": "gated"}, 0, RANK * (96 + D + RANK + 1)),
    ],
)
def test_block_drafter_makes_one_pass_and_small_corrections(
    name, options, convolutions, corrections
):
    made = passes_of(name, block_options(**options))
    counts = {key: (num_weights(of), of.times, of.tokens) for key, of in made.items()}
    expected = {
        "draft": (2 * (LAYER + convolutions), 1, BLOCK),
        "logits": (HEAD, 1, K),
        "features": (TAPS * D * D + 2 * 2 * D * KV, 1, K + 1),
    }
    if corrections is not None:
        expected["corrections"] = corrections, K, 1
    assert counts == expected
    assert [key for key, of in made.items() if of.reads_cache] == ["draft"]
    assert [key for key, of in made.items() if of.phase == "sync"] == ["features"]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_layer_is_read_in_every_step_and_features_are_fused_once(name):
    more = {"tap_layers": (1, 2, 3), "vocab_size": 40} if name == "eagle3" else {}
    made = passes_of(name, {"num_speculative_tokens": K, **more})
    fused = TAPS * D * D if name == "eagle3" else 0
    assert made["draft"].times == K and made["draft"].reads_cache
    assert (num_weights(made["features"]), made["features"].tokens) == (fused, K + 1)
    # EAGLE-3 has a head of its own, and reads a token beside the feature.
    own = D * 40 if name == "eagle3" else HEAD + 2 * D * D
    assert num_weights(made["draft"]) > own + LAYER - 4 * D
