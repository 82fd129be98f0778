"""Norms over the last axis."""

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.models.config import Config


class Norm(nnx.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) or LayerNorm, over the last axis."""

    def __init__(self, config: Config, size: int, *, dtype):
        self.config, self.dtype = config, dtype
        self.scale = nnx.Param(jnp.full(size, 1 - config.norm_offset, dtype))
        if config.norm == "layer":
            self.bias = nnx.Param(jnp.zeros(size, dtype))

    def __call__(self, x):
        config, wide = self.config, jnp.promote_types(x.dtype, jnp.float32)
        x = x.astype(wide)
        if config.norm == "layer":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = divided(x, config.norm_eps)
        x = x * (config.norm_offset + self.scale[...].astype(wide))
        if config.norm == "layer":
            x = x + self.bias[...].astype(wide)
        return x.astype(self.dtype)


def divided(x, norm_eps: float):
    """Returns x divided by the root of its mean square over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm_eps)
