"""Multi-head latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, 2.1) and GLM-4.7."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx

from spsjax.models import caches as kv
from spsjax.models import rope
from spsjax.models.attention import Sinks, attend, weights_of
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.linear import INIT, make_linear
from spsjax.models.norm import Norm
from spsjax.models.quantization import Quantized
from spsjax.models.self_attention import attend_in_chunks
from spsjax.types import Array

# Constant under the root of the latents' norms, whatever `Config.norm_eps` is.
_NORM_EPS = 1e-6


class HeadKernels(nnx.Module):
    """Matrices of a projection by heads, [H, in, out]: each head has its own."""

    def __init__(self, heads: int, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs):
        self.dtype = dtype
        self.kernel = nnx.Param(INIT(rngs.params(), (heads, inputs, outputs), dtype))

    def values(self) -> Array:
        """Returns the matrices in the compute type. Rounded ones are dequantised."""
        kernel = self.kernel.get_value()
        return (kernel.values() if isinstance(kernel, Quantized) else kernel).astype(self.dtype)


class LatentAttention(nnx.Module):
    """Attention in which all heads read one compressed key per token.

    A token's key in the cache is its latent [R], from which each head's key and value are products
    with matrices of the head, and a rotary key [Q] that the heads share. There are no values in the
    cache.

    The matrices are applied in one of two places. In a text without a cache, they give the keys
    and values of each head. Against a cache they are applied to queries and outputs instead, as
    (W latent) . query = latent . (W^T query). Each token then costs R + Q numbers of the cache,
    however many heads there are.
    """

    def __init__(self, config: Config, *, inputs: int | None = None, dtype, rngs: nnx.Rngs):
        """Creates the layer from its own config (`Config.layer`).

        `inputs` is the width of its input; None: the model's width.
        """
        self.config, self.dtype = config, dtype
        inputs, bias = inputs or config.d_model, config.biases == "attention"
        heads, rank = config.num_heads, config.latent_rank
        linear = functools.partial(make_linear, dtype=dtype, rngs=rngs)
        kernels = functools.partial(HeadKernels, heads, dtype=dtype, rngs=rngs)
        with_eps = dataclasses.replace(config, norm_eps=_NORM_EPS)
        if config.query_rank:
            self.query_down = linear(inputs, config.query_rank, bias)
            self.query_norm = Norm(with_eps, config.query_rank, dtype=dtype)
            self.query_up = linear(config.query_rank, heads * config.head_dim, False)
        else:
            self.query = linear(inputs, heads * config.head_dim, False)
        self.latent = linear(inputs, rank + config.rotary_dim, bias)
        self.latent_norm = Norm(with_eps, rank, dtype=dtype)
        self.key_up = kernels(config.head_dim - config.rotary_dim, rank)
        self.value_up = kernels(rank, config.value_dim)
        self.out = linear(heads * config.value_dim, config.d_model, bias)

    def __call__(
        self,
        x_BTD,
        context: Context,
        cached: Sequence[kv.Segment] = (),
        earlier: KeysValues | None = None,
    ):
        """Returns the output, and the block's keys and values including those of these tokens.

        `cached` is this layer's part of the cache, and `earlier` its part of the block so far.
        """
        block = context.append(earlier, *self.keys_values(x_BTD, context))
        query = self._query(x_BTD, context)
        if context.contiguous and not cached:
            read = self._per_head(*query, context, block[0])
            mixed = attend_in_chunks(self.config, context, *read)
        else:
            read = self._compressed(*query, context, cached, block)
            latents_BTHR = attend(*read)[..., : self.config.latent_rank]
            mixed = jnp.einsum("bthr,hrv->bthv", latents_BTHR, self.value_up.values())
        return self.out(mixed.reshape(*x_BTD.shape[:2], -1)), block

    def weights(self, x_BTD, context: Context, cached: Sequence[kv.Segment]) -> list[Array]:
        """Returns the attention weights of these tokens per segment (`attention.weights_of`)."""
        block = context.append(None, *self.keys_values(x_BTD, context))
        query = self._query(x_BTD, context)
        return weights_of(*self._compressed(*query, context, cached, block))

    def keys_values(self, x_BTD, context: Context) -> KeysValues:
        """Returns the tokens' compressed keys [B, T, 1, R + Q], and values without entries."""
        latent, key = jnp.split(self.latent(x_BTD), (self.config.latent_rank,), axis=-1)
        latent = self.latent_norm(latent)
        key = self._rotated(key[:, :, None], context.positions)[:, :, 0]
        # A masked slot has weight 0, but 0 x NaN is NaN. So a latent, which is also a value, is
        # finite, and the rotary key, which is not, tells the queries that attend to the slot.
        finite = jnp.isfinite(latent)
        key = jnp.where(jnp.all(finite, axis=-1, keepdims=True), key, jnp.nan)
        keys = jnp.concatenate([jnp.where(finite, latent, 0), key], axis=-1)[:, :, None]
        return keys, keys[..., :0]

    def _rotated(self, x_BTHQ, positions_BT) -> Array:
        config = self.config
        angles = rope.angles(
            positions_BT, config.rotary_dim, config.rope_theta, config.rope_scaling
        )
        return rope.rotate(x_BTHQ, *angles, config.rope_interleaved)

    def _query(self, x_BTD, context: Context) -> tuple[Array, Array, Array | None]:
        """Returns the queries of each head: the part without positions, and the rotated part.

        The third array is the rotated part for attention sinks; None: there are none.
        """
        config = self.config
        if config.query_rank:
            query = self.query_up(self.query_norm(self.query_down(x_BTD)))
        else:
            query = self.query(x_BTD)
        query = query.reshape(*x_BTD.shape[:2], config.num_heads, config.head_dim)
        plain, rotary = jnp.split(query, (config.head_dim - config.rotary_dim,), axis=-1)
        capped = None
        if config.sinks:
            capped = self._rotated(rotary, context.capped_positions(config))
        return plain, self._rotated(rotary, context.positions), capped

    def _arguments(self, plain_BTHC, rotary_BTHQ, capped_BTHQ, segments) -> tuple:
        """Returns the arguments of `attend` for both parts of the queries."""

        def joined(rotary_BTHQ):
            return jnp.concatenate([plain_BTHC, rotary_BTHQ], axis=-1)

        config = self.config
        sinks = None if capped_BTHQ is None else Sinks(joined(capped_BTHQ), config.sinks)
        scale = config.query_scale or config.head_dim**-0.5
        biases = [None] * len(segments)
        return joined(rotary_BTHQ), segments, biases, scale, config.attention_softcap, sinks

    def _compressed(self, plain, rotary, capped, context: Context, cached, block) -> tuple:
        """Returns the arguments of `attend` whose keys and values are compressed keys.

        The last Q columns of the attended values are no latents.
        """
        plain = jnp.einsum("bthc,hcr->bthr", plain, self.key_up.values())
        segments = [
            dataclasses.replace(segment, values=segment.keys)
            for segment in context.segments(self.config, cached, *block)
        ]
        return self._arguments(plain, rotary, capped, segments)

    def _per_head(self, plain, rotary, capped, context: Context, keys_B1PC: Array) -> tuple:
        """Returns the arguments of `attend` with the keys and values of each head."""
        latent_BPR, key = jnp.split(keys_B1PC[:, 0], (self.config.latent_rank,), axis=-1)
        own = jnp.einsum("bpr,hcr->bhpc", latent_BPR, self.key_up.values())
        shared = jnp.broadcast_to(key[:, None], (*own.shape[:3], key.shape[-1]))
        values = jnp.einsum("bpr,hrv->bhpv", latent_BPR, self.value_up.values())
        keys = jnp.concatenate([own, shared], axis=-1)
        segments = context.segments(self.config, (), keys, values)
        return self._arguments(plain, rotary, capped, segments)
