"""Kernels of `sampling.draw`."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spsjax.sampling.fused import shares
from spsjax.sampling.fused.shares import Share
from spsjax.types import Array
from spsjax.utils.powers import power

supports = shares.supports
_BLOCK = 128  # tokens of a block, from which one is drawn


def draw(weights: Array, uniforms: Array, interpret: bool = False) -> Array:
    """Does what `drawing.draw` does."""
    weights_RV = weights.reshape(-1, weights.shape[-1])
    R, P = len(weights_RV), pl.cdiv(weights_RV.shape[1], shares.SIZE)
    shape = jax.ShapeDtypeStruct((R, P * (shares.SIZE // _BLOCK)), jnp.float32)
    sums = shares.call(_blocks, shape, (R, P), interpret)(weights_RV)
    pick = shares.call(_pick, jax.ShapeDtypeStruct((R,), jnp.int32), (R,), interpret)
    uniforms = jnp.broadcast_to(uniforms, (*weights.shape[:-1], 2)).reshape(R, 2)
    return pick(weights_RV, sums, uniforms).reshape(weights.shape[:-1])


def _blocks(weights_ref, sums_ref) -> None:
    share, count = Share.of(weights_ref), shares.SIZE // _BLOCK
    weights = jnp.where(share.exists, share.x, 0).reshape(count, _BLOCK)
    blocks = share.number * count + jnp.arange(count, dtype=jnp.int32)
    triton.store(sums_ref.at[share.row, blocks], jnp.sum(weights, axis=1))


def _pick(weights_ref, sums_ref, uniforms_ref, token_ref) -> None:
    row, (N, V) = pl.program_id(0), (sums_ref.shape[1], weights_ref.shape[1])
    blocks, inside = (jnp.arange(size, dtype=jnp.int32) for size in (power(N), _BLOCK))
    sums = triton.load(sums_ref.at[row, blocks], mask=blocks < N, other=0.0)
    block = _inverse_cdf(sums, blocks, uniforms_ref[row, 0])
    index = block * _BLOCK + inside
    weights = triton.load(weights_ref.at[row, index], mask=index < V, other=0.0)
    token_ref[row] = block * _BLOCK + _inverse_cdf(weights, inside, uniforms_ref[row, 1])


def _inverse_cdf(weights: Array, index: Array, uniform: Array) -> Array:
    """Returns the first index of positive weight whose prefix sum exceeds `uniform` x total."""
    level = uniform * jnp.sum(weights)
    # Prefix sums that are made in parallel may decrease, so that weights of 0 are left out.
    is_later = (jnp.cumsum(weights) > level) & (weights > 0)
    # A prefix sum may be less than the total by rounding. Then it is the last of positive weight.
    last = jnp.max(jnp.where(weights > 0, index, 0))
    return jnp.minimum(jnp.min(jnp.where(is_later, index, shares.LAST)), last)
