"""Inputs of each layer that depend on the token: per-layer embeddings (Gemma 3n, Gemma 4)."""

import functools

import jax.numpy as jnp
from flax import nnx

from spsjax.models.config import Config
from spsjax.models.linear import ACTIVATIONS, INIT, make_linear
from spsjax.models.norm import Norm
from spsjax.parallel import sharding
from spsjax.types import Array


class LayerInputs(nnx.Module):
    """Second embedding of the tokens, with one small vector per layer.

    The input of a layer is the mean of the token's entry in a table and of a projection of the
    token's embedding, times the square root of 2, so that both have the same share of the variance.
    """

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        width = config.num_layers * config.layer_inputs
        self.input_table = nnx.Embed(
            config.layer_input_rows or config.vocab_rows,
            width,
            dtype=dtype,
            param_dtype=dtype,
            embedding_init=INIT,
            rngs=rngs,
        )
        self.input_projection = make_linear(config.d_model, width, False, dtype=dtype, rngs=rngs)
        self.norm = Norm(config, config.layer_inputs, dtype=dtype)

    def __call__(self, tokens_BT: Array, embedded_BTD: Array) -> Array:
        """Returns the inputs [B, T, L, I] of all layers; `embedded_BTD` are the embeddings."""
        config, dtype = self.config, embedded_BTD.dtype
        shape = (*tokens_BT.shape, config.num_layers, config.layer_inputs)
        # Split by columns on a mesh; each layer reads a few of them.
        table = sharding.whole_rows(self.input_table(tokens_BT)).reshape(shape)
        projected = self.input_projection(embedded_BTD) * jnp.asarray(config.d_model**-0.5, dtype)
        projected = self.norm(sharding.whole_rows(projected).reshape(shape))
        scale = jnp.asarray(config.layer_inputs**0.5, dtype)
        return (projected + table * scale) * jnp.asarray(0.5**0.5, dtype)


class LayerInput(nnx.Module):
    """Update of the residual stream by a layer's input, through a gate."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        linear = functools.partial(make_linear, bias=False, dtype=dtype, rngs=rngs)
        self.input_gate = linear(config.d_model, config.layer_inputs)
        self.input_out = linear(config.layer_inputs, config.d_model)
        self.norm = Norm(config, config.d_model, dtype=dtype)

    def __call__(self, x_BTD: Array, inputs_BTI: Array) -> Array:
        gate = ACTIVATIONS[self.config.ffn](self.input_gate(x_BTD))
        return self.norm(self.input_out(gate * inputs_BTI))
