"""The data that crosses module boundaries, and the one legend of shape letters.

Shape letters, used in names (`logits_BTV`) and in docstrings (`[B, T, V]`) everywhere:

    B  rows of the batch                 D  model width
    T  query tokens of one forward pass  F  feed-forward width
    S  slots of a cache or token buffer  H  query heads
    K  speculative tokens                G  key-value heads
    V  vocabulary                        C  head size
"""

import dataclasses
from typing import Any

import jax

Array = jax.Array
PyTree = Any


def pytree_dataclass(cls):
    """A frozen dataclass whose every field is a pytree of arrays."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@pytree_dataclass
class ModelOutput:
    """What one forward pass of a model returns."""

    logits: Array  # [B, T, V] float32
    hidden: Array  # [B, T, D] after the final norm
    cache: Any  # KVCache that also holds the T new tokens, or None


@pytree_dataclass
class Proposal:
    """K draft tokens a row, and the distributions that they were really drawn from."""

    tokens: Array  # [B, K] int32; -1: no proposal from here on
    probs: Array | None  # [B, K, V] float32, as drawn from; None: each token is a point mass


@pytree_dataclass
class Verdict:
    """What a verifier decided about one proposal."""

    tokens: Array  # [B, K+1] int32: accepted drafts, then the residual or bonus token, then -1
    num_tokens: Array  # [B] int32, 1..K+1; without the last one where the row is not valid
    valid: Array  # [B] bool; False: the token after `num_tokens` has no law (not finite, or all 0)
