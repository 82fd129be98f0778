"""Feed-forward networks."""

import functools

import jax
from flax import nnx

from spsjax.models.config import Config
from spsjax.models.linear import ACTIVATIONS, make_linear


class FeedForward(nnx.Module):
    """Feed-forward network: SwiGLU or GEGLU (Shazeer 2020, arXiv 2002.05202), or plain GELU."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        linear = functools.partial(make_linear, bias=config.biases == "all", dtype=dtype, rngs=rngs)
        if config.ffn != "gelu":
            self.gate = linear(config.d_model, config.d_ff)
        self.up = linear(config.d_model, config.d_ff)
        self.down = linear(config.d_ff, config.d_model)

    def __call__(self, x_BTD, stream_BTD=None):
        """Returns the outputs [B, T, D] for normalised inputs.

        `stream_BTD` is the residual stream before the norm, for networks with norms of their own.
        """
        if self.config.ffn == "gelu":
            return self.down(jax.nn.gelu(self.up(x_BTD)))
        return self.down(ACTIVATIONS[self.config.ffn](self.gate(x_BTD)) * self.up(x_BTD))
