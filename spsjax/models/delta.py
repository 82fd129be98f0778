"""Flax module of the gated delta net, a recurrent layer in the place of attention.

Gated Delta Networks (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have them:
queries, keys and values pass a short causal convolution, keys and queries have length 1, and a gate
follows the norm of each head's output.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from spsjax import tree
from spsjax.models import delta_rule
from spsjax.models.caches import Nodes, State
from spsjax.models.config import Config
from spsjax.models.context import Context
from spsjax.models.linear import INIT, make_linear
from spsjax.types import Array

_EPS = 1e-6  # under the root of the lengths of keys and queries


class GatedDeltaNet(nnx.Module):
    """Gated delta net: G heads of queries and keys of width C, and H heads of values of width V.

    These are `num_kv_heads`, `head_dim`, `num_heads` and `value_dim` of the layer's own config
    (`Config.layer`). The state after a token has a fixed size, whatever the length of the text.
    """

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        linear = functools.partial(make_linear, bias=False, dtype=dtype, rngs=rngs)
        keys, width = config.num_kv_heads * config.head_dim, config.value_dim
        values = config.num_heads * width
        for name, size in (("query", keys), ("key", keys), ("value", values)):
            setattr(self, name, linear(config.d_model, size))
            taps = INIT(rngs.params(), (config.delta_taps, size), dtype)
            setattr(self, f"{name}_taps", nnx.Param(taps))
        self.gate = linear(config.d_model, values)
        self.strength = linear(config.d_model, config.num_heads)
        self.decay = linear(config.d_model, config.num_heads)
        ones = jnp.ones(config.num_heads, dtype)
        self.decay_rate, self.decay_bias = nnx.Param(jnp.zeros_like(ones)), nnx.Param(ones)
        self.scale = nnx.Param(jnp.ones(width, dtype))
        self.out = linear(values, config.d_model)

    def __call__(
        self,
        x_BTD,
        context: Context,
        cached: Any = (),
        earlier: tuple[Nodes, None] | None = None,
    ) -> tuple[Array, tuple[Nodes, None]]:
        """Returns the output, and the block's nodes including these tokens.

        `cached` is this layer's state before the block; (): zeros. `earlier` is its part of the
        block so far.
        """
        state: State | None = cached or None
        config, nodes = self.config, earlier[0] if earlier else None
        layers = self.query, self.key, self.value
        new = [_by_heads(layer(x_BTD), heads) for layer, heads in zip(layers, self._heads)]
        inputs = context.appended(nodes and nodes.inputs, tuple(new))
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        query, key, value = self._convolved(inputs, context, state, wide)
        decay, strength = (
            jnp.swapaxes(layer(x_BTD), 1, 2).astype(wide) for layer in (self.decay, self.strength)
        )
        rate = jnp.exp(self.decay_rate[...].astype(wide))[:, None]
        decay = decay + self.decay_bias[...].astype(wide)[:, None]
        tokens = delta_rule.finite_tokens(
            delta_rule.Tokens(
                _unit(query) * config.head_dim**-0.5,
                _unit(key),
                value,
                -rate * jax.nn.softplus(decay),
                jax.nn.sigmoid(strength),
            )
        )
        memory = None if state is None else state.memory.astype(wide)
        if context.contiguous:
            mixed, updates = delta_rule.over_text(tokens, memory)
        else:
            before = nodes.updates if nodes else None
            among = memory, before, 0 if context.size is None else context.size
            mixed, updates = delta_rule.over_nodes(tokens, context.block_visible, *among)
            updates = context.appended(before, updates)
        return self.out(self._gated(mixed, self.gate(x_BTD))), (Nodes(inputs, updates), None)

    @property
    def _heads(self) -> tuple[int, int, int]:
        """Number of heads of queries, keys and values."""
        return self.config.num_kv_heads, self.config.num_kv_heads, self.config.num_heads

    def _convolved(self, inputs, context: Context, state: State | None, wide) -> list[Array]:
        """Returns queries, keys and values [B, heads, T, C] of the new nodes.

        Each is a weighted sum over the inputs of a node and of the W - 1 tokens before it, which
        are its ancestors in the block and the last tokens before the block.
        """
        W, T = self.config.delta_taps, context.positions.shape[1]
        taps = self.query_taps, self.key_taps, self.value_taps
        windows = state.inputs if state else [None] * len(inputs)
        index_BTW = None if context.contiguous else _newest(context.block_visible, W)
        convolved = []
        for rows, window, kernel in zip(inputs, windows, taps):
            B, heads, _, C = rows.shape
            if window is None:
                window = jnp.zeros((B, heads, W - 1, C), rows.dtype)
            rows = jnp.concatenate([window.astype(rows.dtype), rows], axis=2).astype(wide)
            kernel = kernel[...].astype(wide).reshape(W, heads, 1, C)
            total = 0
            for back in range(W):
                if index_BTW is None:
                    read = lax.slice_in_dim(rows, W - 1 - back, W - 1 - back + T, axis=2)
                else:
                    index = jnp.broadcast_to(index_BTW[..., back], (B, T))
                    read = tree.along(index, rows, axis=2)
                total = total + read * kernel[W - 1 - back]
            convolved.append(jax.nn.silu(total).astype(self.dtype).astype(wide))
        return convolved

    def _gated(self, mixed_BHTV: Array, gate_BTI: Array) -> Array:
        """Returns the outputs of all heads [B, T, HV], normalised and gated."""
        wide = mixed_BHTV.dtype
        x = jnp.swapaxes(mixed_BHTV, 1, 2)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.config.norm_eps)
        x = (x * self.scale[...].astype(wide)).reshape(gate_BTI.shape)
        return (x * jax.nn.silu(gate_BTI.astype(wide))).astype(self.dtype)


def _by_heads(x_BTI: Array, heads: int) -> Array:
    """Returns the heads of a projection: [B, heads, T, C]."""
    return jnp.swapaxes(x_BTI.reshape(*x_BTI.shape[:2], heads, -1), 1, 2)


def _unit(x: Array) -> Array:
    """Returns keys or queries of length 1."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def _newest(visible_BTP: Array, count: int) -> Array:
    """Returns the indices [B, T, count] of a node's newest ancestors, the node itself first.

    They count from `count` - 1 tokens before the block. Ancestors are in the order of nodes.
    """
    visible = jnp.pad(visible_BTP, ((0, 0), (0, 0), (count - 1, 0)), constant_values=True)
    behind = jnp.cumsum(visible[..., ::-1], axis=-1)[..., ::-1]
    chosen = visible[..., None, :] & (behind[..., None, :] == jnp.arange(1, count + 1)[:, None])
    return jnp.argmax(chosen, axis=-1)
