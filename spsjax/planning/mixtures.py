"""A model of the number of experts that a pass reads, and so of the cost of verification.

Tokens choose their experts independently. Real tokens of one text more often choose the same, so
this is an upper bound (Cascade, arXiv 2506.20675, measures 2 to 3 times the time of one token).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.errors import InputError, check_integer, check_number
from spsjax.loading import Model


def popularity(num_experts: int, per_token: int, skew: float = 0.0) -> np.ndarray:
    """Returns [E], the share of tokens that choose an expert; the sum is `per_token`.

    With the exponent s = `skew`, popularities are 1, 1 / 2^s, 1 / 3^s, ..., limited to 1. With 0,
    all experts are equally popular.
    """
    check_integer("num_experts", num_experts, 1)
    check_integer("per_token", per_token, 1, num_experts)
    check_number("skew", skew, 0, 100)
    weights = np.arange(1, num_experts + 1) ** -float(skew)
    for always in range(per_token):  # experts whose share would be above 1
        rest = weights[always:] * (per_token - always) / weights[always:].sum()
        if rest[0] <= 1:
            break
    return np.concatenate([np.ones(always), np.minimum(rest, 1)])


def distinct_experts(popularity_E: Sequence[float], tokens: int) -> float:
    """Returns the expected number of distinct experts that some tokens choose."""
    return float(np.sum(1 - (1 - np.asarray(popularity_E)) ** tokens))


def with_skew(model: Model, skew: float) -> Model:
    """Returns a mixture of random weights whose tokens prefer the first experts of every layer.

    All embeddings get a common part, which the routers read: per factor e in the expert's number,
    its logit is lower by `skew` of its standard deviations. With a tied head the common part adds
    the same to all logits. Raises InputError if the model is not a mixture, or for a `skew` below 0
    or not finite.
    """
    config = model.config
    if not config.num_experts:
        raise InputError(f"router_skew: {model.name}: expected a mixture of experts, found none")
    check_number("router_skew", skew, 0, 100)
    width = config.d_model
    common = jnp.ones(width) / width**0.5
    table = model.params["embed"]["embedding"]
    # As long as an embedding of random weights, so that it is about half of the first stream.
    length = float(jnp.mean(jnp.linalg.norm(table.astype(jnp.float32), axis=-1)))
    offsets = -skew * jnp.log(jnp.arange(1, config.num_experts + 1))
    reads = (width / 2) ** 0.5  # of the common part, in a normalised stream

    def skewed(path, leaf):
        names = [getattr(entry, "key", "") for entry in path]
        if names[-2:] == ["embed", "embedding"]:
            return leaf + (length * common).astype(leaf.dtype)
        if names[-2:] == ["router", "kernel"]:
            deviation = jnp.std(leaf.astype(jnp.float32)) * width**0.5  # of a logit
            return leaf + (common[:, None] * offsets * deviation / reads).astype(leaf.dtype)
        return leaf

    params = jax.tree_util.tree_map_with_path(skewed, model.params)
    return dataclasses.replace(model, params=params)
