"""Tokens drawn from weights."""

import jax
import jax.numpy as jnp

from spsjax.types import Array
from spsjax.utils import kernel_choice


@jax.named_scope("draw")
def draw(weights: Array, uniforms: Array) -> Array:
    """Draws a token from unnormalised weights by the inverse CDF: [..., V], [..., 2] -> [...].

    It draws a block of tokens, then a token of that block, with one random number for each. So one
    pass over the vocabulary suffices, and the 23 random bits of a float32 do not limit how rare a
    token can be. Prefix sums are monotone: a token of weight 0 is never drawn unless all are 0.
    """
    kernels = kernel_choice.kernels_of("sampling.fused.drawing")
    if kernels is None or not kernels.supports(weights):
        return _draw(weights, uniforms)
    return kernel_choice.chosen(kernels.draw, _draw)(weights, uniforms)


def _draw(weights: Array, uniforms: Array) -> Array:
    """Does what `draw` does, in plain XLA."""
    vocab = weights.shape[-1]
    width = min(128, vocab)
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, -vocab % width)]
    blocks = jnp.pad(weights, padding).reshape(*weights.shape[:-1], -1, width)
    block = _inverse_cdf(jnp.sum(blocks, axis=-1), uniforms[..., 0])
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * width + _inverse_cdf(inside, uniforms[..., 1])).astype(jnp.int32)


def _inverse_cdf(weights: Array, uniform: Array) -> Array:
    """Returns the first index whose prefix sum exceeds `uniform` x total: [..., N], [...] -> [...].

    Every prefix sum is the same masked sum over the short last axis, so the sums are monotone. A
    parallel `cumsum` adds in another order for each entry, and need not be.
    """
    positions = jnp.arange(weights.shape[-1])
    in_prefix = positions[:, None] >= positions
    ends = jnp.sum(jnp.where(in_prefix, weights[..., None, :], 0), axis=-1)
    level = uniform.astype(weights.dtype)[..., None] * ends[..., -1:]
    # `uniform` x total may round up to the total. Then the last token of positive weight is drawn.
    last = jnp.max(jnp.where(weights > 0, positions, 0), axis=-1)
    return jnp.minimum(jnp.sum(ends <= level, axis=-1), last)
