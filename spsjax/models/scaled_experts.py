"""Mixture of experts beside a feed-forward network of all tokens, each with norms (Gemma 4)."""

import functools

import jax.numpy as jnp
from flax import nnx

from spsjax.models.config import Config
from spsjax.models.experts import Experts
from spsjax.models.norm import Norm
from spsjax.types import Array


class ScaledExperts(Experts):
    """Mixture whose router reads the normalised stream, with a learned factor for each expert."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        norm = functools.partial(Norm, config, config.d_model, dtype=dtype)
        self.router_norm, self.shared_post_norm = norm(), norm()
        self.mixture_norm, self.mixture_post_norm = norm(), norm()
        self.scale = nnx.Param(jnp.ones(config.num_experts, dtype))

    def __call__(self, x_BTD, stream_BTD=None) -> Array:
        """Returns the outputs [B, T, D]; the experts read the stream, the network a norm of it."""
        shared = self.shared_post_norm(self.shared(x_BTD))
        scores, ids = self._chosen(self.router_norm(stream_BTD) * self.config.d_model**-0.5)
        mixed = self._mixed(self.mixture_norm(stream_BTD), scores, ids, self.scale[...])
        return shared + self.mixture_post_norm(mixed)
