"""The attention of a decoder block."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.models import caches as kv
from spsjax.models import rope
from spsjax.models.attention import (
    QUERY_CHUNK,
    Sinks,
    attend,
    in_chunks,
    weights_of,
)
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues, finite_values
from spsjax.models.linear import make_linear
from spsjax.models.norm import Norm, divided
from spsjax.models.relative import (
    distance_scores,
    relative_positions,
    scores_of_distances,
    scores_of_slots,
)
from spsjax.types import Array


def _unfused(*products: Array) -> tuple[Array, ...]:
    """Returns products with weights behind an optimization barrier, except on GPUs.

    Without the barrier, the TPU's compiler derives the layout of the kernels from the layout of
    heads, and keeps a second, transposed copy of each kernel (2 GB per chip for 70B on 16 chips).
    On a GPU the barrier would only prevent fusion.
    """

    def barrier(*products):
        return jax.lax.optimization_barrier(products)

    def identity(*products):
        return products

    return jax.lax.platform_dependent(*products, default=barrier, cuda=identity, rocm=identity)


def angles_of(config: Config, positions_BT: Array) -> tuple[Array, Array]:
    """Returns cosine and sine [B, T, 1, C/2] of a layer's rotation; `config` is its own."""
    local = config.window(0) and config.rope_theta_local
    theta, scaling = (local, ()) if local else (config.rope_theta, config.rope_scaling)
    return rope.angles(positions_BT, config.rotary_dim or config.head_dim, theta, scaling)


def limits(config: Config) -> tuple[float, float]:
    """Returns factor and soft cap of a layer's scores."""
    return config.query_scale or config.head_dim**-0.5, config.attention_softcap


def attend_in_chunks(
    config: Config, context: Context, query, segments, biases, scale, softcap, sinks
) -> Array:
    """Returns the result of `attend`; long texts without a cache run in chunks."""
    no_cache = context.contiguous and len(segments) == 1 and biases == [None]
    if not no_cache or query.shape[1] <= QUERY_CHUNK:
        return attend(query, segments, biases, scale, softcap, sinks)
    (block,) = segments

    def attend_chunk(query, positions_BT, sinks):
        visible = block.positions[:, None] <= positions_BT[:, :, None]
        chunk = dataclasses.replace(context, positions=positions_BT, block_visible=visible)
        windowed = chunk.segments(config, (), block.keys, block.values)
        return attend(query, windowed, biases, scale, softcap, sinks)

    return in_chunks(attend_chunk, query, context.positions, sinks)


class Attention(nnx.Module):
    """Grouped-query attention: H query heads read G key-value heads."""

    def __init__(self, config: Config, *, inputs: int | None = None, dtype, rngs: nnx.Rngs):
        """Creates the layer from its own config (`Config.layer`).

        `inputs` is the width of its input; None: the model's width.
        """
        self.config, self.dtype = config, dtype
        inputs = inputs or config.d_model
        bias = config.biases != "none"
        linear = functools.partial(make_linear, dtype=dtype, rngs=rngs)
        size = config.head_dim
        # With a gate, each head has the entries of its query, then those of its gate.
        self.query = linear(inputs, config.num_heads * size * (1 + config.attention_gate), bias)
        self.key = linear(inputs, config.num_kv_heads * size, bias)
        if not config.value_is_key:
            self.value = linear(inputs, config.num_kv_heads * size, bias)
        has_out_bias = config.biases in ("attention", "all")
        self.out = linear(config.num_heads * size, config.d_model, has_out_bias)
        if config.qk_norm:
            self.query_norm, self.key_norm = (Norm(config, size, dtype=dtype) for _ in range(2))
        if config.positions == "relative":
            self.position = linear(config.d_model, config.num_heads * size, False)
            zeros = jnp.zeros((config.num_heads, size), dtype)
            self.content_bias, self.position_bias = nnx.Param(zeros), nnx.Param(zeros)

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
        arguments, block, gate = self._attend_arguments(x_BTD, context, cached, earlier)
        mixed = attend_in_chunks(self.config, context, *arguments)
        mixed = mixed if gate is None else mixed * jax.nn.sigmoid(gate)
        return self.out(mixed.reshape(*x_BTD.shape[:2], -1)), block

    def weights(self, x_BTD, context: Context, cached: Sequence[kv.Segment]) -> list[Array]:
        """Returns the attention weights of these tokens per segment (`attention.weights_of`)."""
        return weights_of(*self._attend_arguments(x_BTD, context, cached, None)[0])

    def keys_values(self, x_BTD, context: Context) -> KeysValues:
        """Returns the tokens' keys and values [B, T, G, C], without computing attention."""
        key, value = _unfused(*self._projected(x_BTD))
        return self._heads(key, value, context)

    def _projected(self, x_BTD) -> tuple[Array, Array]:
        """Returns the projections of tokens to keys and to values [B, T, G C]."""
        key = self.key(x_BTD)
        return key, key if self.config.value_is_key else self.value(x_BTD)

    def _heads(self, key, value, context: Context) -> KeysValues:
        """Returns keys and values per head [B, T, G, C], normalised and rotated."""
        config, (B, T, _) = self.config, key.shape
        key = key.reshape(B, T, config.num_kv_heads, config.head_dim)
        value = value.reshape(B, T, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            key = self.key_norm(key)
        if config.value_norm:
            wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
            value = divided(wide, config.norm_eps).astype(value.dtype)
        if config.positions == "rotary":
            key = self._rotated(key, context.positions)
        return finite_values(key, value)

    def _rotated(self, x_BTHC, positions_BT) -> Array:
        angles = angles_of(self.config, positions_BT)
        return rope.rotate(x_BTHC, *angles, self.config.rope_interleaved)

    def _attend_arguments(
        self,
        x_BTD,
        context: Context,
        cached: Sequence[kv.Segment],
        earlier: KeysValues | None,
    ) -> tuple[tuple, KeysValues, Array | None]:
        """Returns the arguments of `attend`, the block's keys and values, and the output gate."""
        config = self.config
        query, key, value = _unfused(self.query(x_BTD), *self._projected(x_BTD))
        query, gate, sinks = self._queries(query, context)
        block = context.append(earlier, *self._heads(key, value, context))
        segments = context.segments(config, cached, *block)
        biases = [None] * len(segments)
        if config.positions == "relative":
            # Transformer-XL's four terms: (q + u) k and (q + v) r, with r of the distance alone.
            biases = self._relative_biases(query + self.position_bias[...], context, segments)
            query = query + self.content_bias[...]
        return (query, segments, biases, *limits(config), sinks), block, gate

    def _queries(self, query, context: Context) -> tuple[Array, Array | None, Sinks | None]:
        """Returns queries per head [B, T, H, C], normalised and rotated, gate, and sinks."""
        config, (B, T, _) = self.config, query.shape
        query, gate, sinks = query.reshape(B, T, config.num_heads, -1), None, None
        if config.attention_gate:
            query, gate = jnp.split(query, 2, axis=-1)
        if config.qk_norm:
            query = self.query_norm(query)
        if config.positions == "rotary":
            if config.sinks:
                capped = self._rotated(query, context.capped_positions(config))
                sinks = Sinks(capped, config.sinks)
            query = self._rotated(query, context.positions)
        return query, gate, sinks

    def _relative_biases(self, query_BTHC, context: Context, segments) -> list[Array]:
        """Returns the scores of relative positions [B, T, H, S] per segment."""
        *cached, block = segments
        P = block.keys.shape[2]
        positions = jnp.broadcast_to(context.positions, query_BTHC.shape[:2])
        # One product for all segments. Its last columns are the nearest distances, those within the
        # block. A second product with a part of the table makes the TPU's compiler copy all tables.
        table = cached[0].distances if cached else self.distances(P)
        scores = distance_scores(query_BTHC, table)
        biases = []
        for segment in segments:
            is_block = segment is block
            if self.config.recent or not (context.contiguous if is_block else segment.ordered):
                distances = self._distances(context, positions, segment.positions)
                biases.append(scores_of_distances(scores, distances))
            elif is_block:
                biases.append(scores_of_slots(scores[..., -P:], positions - positions[:, :1]))
            else:
                biases.append(scores_of_slots(scores, positions))
        return biases

    def _distances(self, context: Context, positions_BT: Array, key_positions_BS: Array) -> Array:
        """Returns the distance [B, T, S] from each query back to each key."""
        capped = context.capped_positions(self.config)[:, :, None]
        key_positions = key_positions_BS[:, None]
        is_sink = key_positions < self.config.sinks
        return jnp.where(is_sink, capped, positions_BT[:, :, None]) - key_positions

    def distances(self, slots: int) -> Array:
        """Returns the projections [H, S, C] of the distances S-1, ..., 0 per head."""
        positions = relative_positions(slots, self.config.d_model).astype(self.dtype)
        heads = self.position(positions).reshape(slots, -1, self.config.head_dim)
        return jnp.swapaxes(heads, 0, 1)
