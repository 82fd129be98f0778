"""Modules of a decoder block."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax import caches as kv
from spsjax.models import rope
from spsjax.models.attention import (
    MANY_QUERIES,
    Sinks,
    attend,
    distance_scores,
    in_turn,
    relative_positions,
    scores_of_distances,
    scores_of_slots,
    weights_of,
)
from spsjax.models.config import Config
from spsjax.models.experts import Experts
from spsjax.models.linear import ACTIVATIONS, make_linear, two_rows
from spsjax.parallel import sharding
from spsjax.types import Array, Block, pytree_dataclass


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
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
        x = x * (config.norm_offset + self.scale[...].astype(wide))
        if config.norm == "layer":
            x = x + self.bias[...].astype(wide)
        return x.astype(self.dtype)


KeysValues = tuple[Array, Array]  # [B, G, P, C] each


@pytree_dataclass
class Context:
    """Positions and masks of one pass, shared by all layers.

    Attributes:
        positions: [B, T] the tokens' positions.
        block_positions: [B, P] those of the block's nodes, these tokens included.
        block_visible: [B, T, P] bool, the nodes that a token sees.
        size: [] nodes of the block before these tokens; None if there is no such block.
        contiguous: whether the block is these tokens alone, at consecutive positions.
    """

    positions: Array
    block_positions: Array
    block_visible: Array
    size: Array | None
    contiguous: bool = dataclasses.field(metadata={"static": True})

    def append(self, earlier: KeysValues | None, *new: Array) -> KeysValues:
        """Returns the block's keys and values with those of these tokens behind them."""
        new = [sharding.whole_heads(jnp.swapaxes(rows_BTGC, 1, 2)) for rows_BTGC in new]
        if earlier is None:
            return tuple(new)
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=2)
        grown = (update(old, rows, self.size) for old, rows in zip(earlier, new))
        return tuple(map(sharding.whole_heads, grown))

    def block(self, layers: Sequence[KeysValues], batch: int) -> Block:
        """Returns the block of the keys and values that `append` returned in each layer."""
        keys, values = zip(*layers)
        shape = batch, self.block_positions.shape[1]
        earlier = 0 if self.size is None else self.size
        size = jnp.asarray(self.positions.shape[1] + earlier, jnp.int32)
        return Block(keys, values, jnp.broadcast_to(self.block_positions, shape), size)

    def segments(
        self, config: Config, layer: int, cached: Sequence[kv.Segment], keys: Array, values: Array
    ) -> list[kv.Segment]:
        """Returns what the tokens see of a layer's cache and of its part of the block."""
        block = kv.Segment(keys, values, self.block_visible, self.block_positions, None)
        return [self._near(config, layer, segment) for segment in (*cached, block)]

    def _near(self, config: Config, layer: int, segment: kv.Segment) -> kv.Segment:
        """Returns a segment without what is too many positions back."""
        if segment.positions is None:
            return segment
        known, visible = segment.positions[:, None], segment.visible
        if config.recent:
            near = known > self.positions[:, :, None] - config.recent
            visible = visible & (near | (known < config.sinks))
        if window := config.window(layer):
            visible = visible & (known > self.positions[:, :, None] - window)
        return dataclasses.replace(segment, visible=visible)

    def capped_positions(self, config: Config) -> Array:
        """Returns the tokens' positions [B, T] as seen from the sinks.

        They are those in a text without what lies between the sinks and the window.
        """
        return jnp.minimum(self.positions, config.sinks + config.recent - 1)


def context_of(
    num_tokens: int,
    cache: kv.KVCache | None,
    block: Block | None = None,
    positions_BT: Array | None = None,
    ancestors: Array | None = None,
) -> Context:
    """Returns positions and masks of a pass; the masks follow from positions and ancestors.

    The arguments are those of `transformer.apply`.
    """
    contiguous = block is None and positions_BT is None and ancestors is None
    if positions_BT is None:
        # Without a cache all rows are alike, and one mask serves them.
        start = jnp.zeros(1, jnp.int32) if cache is None else cache.lengths
        start = start if block is None else start + block.size
        positions_BT = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    positions_BT = jnp.asarray(positions_BT, jnp.int32)
    if block is not None:
        rows = block.positions.shape[0]
        positions_BT = jnp.broadcast_to(positions_BT, (rows, num_tokens))
    known = positions_BT
    if block is not None:
        known = jax.lax.dynamic_update_slice_in_dim(
            block.positions, positions_BT, block.size, axis=1
        )
    visible = known[:, None] >= 0
    if ancestors is None:
        visible = visible & (known[:, None] <= positions_BT[:, :, None])
    else:
        visible = visible & ancestors
    size = None if block is None else block.size
    return Context(positions_BT, known, visible, size, contiguous)


def _finite_values(key: Array, value: Array) -> KeysValues:
    """Moves what is not finite from values to keys.

    A masked slot weighs zero, and zero times NaN is NaN. In the key only those who see the slot
    meet the NaN.
    """
    finite = jnp.isfinite(value)
    return jnp.where(finite, key, jnp.nan), jnp.where(finite, value, 0)


def _apart(*products: Array) -> tuple[Array, ...]:
    """Returns products with weights as they are, behind a barrier except on GPUs.

    Without it the TPU's compiler lets the layout of heads choose the kernels', and keeps a second,
    transposed copy of each (2 GB per chip for 70B on 16 chips). On a GPU it would only keep what
    follows from becoming a part of the same kernel.
    """

    def barrier(*products):
        return jax.lax.optimization_barrier(products)

    def nothing(*products):
        return products

    return jax.lax.platform_dependent(*products, default=barrier, cuda=nothing, rocm=nothing)


class Attention(nnx.Module):
    """Grouped-query attention: H query heads read G key-value heads."""

    def __init__(
        self, config: Config, layer: int, *, inputs: int | None = None, dtype, rngs: nnx.Rngs
    ):
        """Makes the layer; it reads `inputs` numbers per token, None: the model's width."""
        self.config, self.dtype, self.layer = config, dtype, layer
        inputs = inputs or config.d_model
        bias = config.biases != "none"
        linear = functools.partial(make_linear, dtype=dtype, rngs=rngs)
        size = config.head_dim
        self.query = linear(inputs, config.num_heads * size, bias)
        self.key = linear(inputs, config.num_kv_heads * size, bias)
        self.value = linear(inputs, config.num_kv_heads * size, bias)
        self.out = linear(config.num_heads * size, config.d_model, config.biases == "all")
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
        """Returns the output, and the block's keys and values with those of these tokens.

        `cached` is this layer's part of the cache, `earlier` of the block so far.
        """
        reading, block = self._reading(x_BTD, context, cached, earlier)
        mixed = self._attended(context, *reading)
        return self.out(mixed.reshape(*x_BTD.shape[:2], -1)), block

    def weights(self, x_BTD, context: Context, cached: Sequence[kv.Segment]) -> list[Array]:
        """Returns how much these tokens attend to each segment, as `attention.weights_of` does."""
        return weights_of(*self._reading(x_BTD, context, cached, None)[0])

    def keys_values(self, x_BTD, context: Context) -> KeysValues:
        """Returns the tokens' keys and values [B, T, G, C] alone."""
        return self._heads(*_apart(self.key(x_BTD), self.value(x_BTD)), context)

    def _attended(self, context: Context, query, segments, biases, scale, softcap, sinks) -> Array:
        """Returns what queries [B, T, H, C] attend to; a long text without a cache in turn."""
        alone = context.contiguous and len(segments) == 1 and biases == [None]
        if not alone or query.shape[1] <= MANY_QUERIES:
            return attend(query, segments, biases, scale, softcap, sinks)
        (block,) = segments

        def attended(query, positions_BT, sinks):
            seen = block.positions[:, None] <= positions_BT[:, :, None]
            now = dataclasses.replace(context, positions=positions_BT, block_visible=seen)
            near = now.segments(self.config, self.layer, (), block.keys, block.values)
            return attend(query, near, biases, scale, softcap, sinks)

        return in_turn(attended, query, context.positions, sinks)

    def _heads(self, key, value, context: Context) -> KeysValues:
        """Returns keys and values [B, T, G, C] from what the weights give of tokens."""
        config, (B, T, _) = self.config, key.shape
        key = key.reshape(B, T, config.num_kv_heads, config.head_dim)
        value = value.reshape(B, T, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            key = self.key_norm(key)
        if config.positions == "rotary":
            key = self._rotated(key, context.positions)
        return _finite_values(key, value)

    def _rotated(self, x_BTHC, positions_BT) -> Array:
        config = self.config
        local = config.window(self.layer) and config.rope_theta_local
        theta, scaling = (local, ()) if local else (config.rope_theta, config.rope_scaling)
        return rope.rotate(x_BTHC, *rope.angles(positions_BT, config.head_dim, theta, scaling))

    def _reading(
        self, x_BTD, context: Context, cached: Sequence[kv.Segment], earlier: KeysValues | None
    ) -> tuple[tuple, KeysValues]:
        """Returns the arguments of `attend`, and the block's keys and values."""
        config, (B, T, _) = self.config, x_BTD.shape
        query, *own = _apart(self.query(x_BTD), self.key(x_BTD), self.value(x_BTD))
        query = query.reshape(B, T, config.num_heads, config.head_dim)
        if config.qk_norm:
            query = self.query_norm(query)
        sinks = None
        if config.positions == "rotary":
            if config.sinks:
                capped = self._rotated(query, context.capped_positions(config))
                sinks = Sinks(capped, config.sinks)
            query = self._rotated(query, context.positions)
        block = context.append(earlier, *self._heads(*own, context))
        segments = context.segments(config, self.layer, cached, *block)
        biases = [None] * len(segments)
        if config.positions == "relative":
            # Transformer-XL's four terms: (q + u) k and (q + v) r, with r of the distance alone.
            biases = self._relative_biases(query + self.position_bias[...], context, segments)
            query = query + self.content_bias[...]
        scale = config.query_scale or config.head_dim**-0.5
        return (query, segments, biases, scale, config.attention_softcap, sinks), block

    def _relative_biases(self, query_BTHC, context: Context, segments) -> list[Array]:
        """Returns one [B, T, H, S] per segment."""
        *cached, block = segments
        P = block.keys.shape[2]
        positions = jnp.broadcast_to(context.positions, query_BTHC.shape[:2])
        # One product serves all segments: the scores end with the nearest distances, a block's.
        # A second one, with a part of the table, makes the TPU's compiler copy every table.
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

    def _distances(self, context: Context, positions_BT: Array, known_BS: Array) -> Array:
        """Returns [B, T, S]: how far back keys are."""
        capped = context.capped_positions(self.config)[:, :, None]
        is_sink, known = known_BS[:, None] < self.config.sinks, known_BS[:, None]
        return jnp.where(is_sink, capped, positions_BT[:, :, None]) - known

    def distances(self, slots: int) -> Array:
        """Returns [H, S, C]: the projections of the distances S-1, ..., 0 for each head."""
        positions = relative_positions(slots, self.config.d_model).astype(self.dtype)
        heads = self.position(positions).reshape(slots, -1, self.config.head_dim)
        return jnp.swapaxes(heads, 0, 1)


class FeedForward(nnx.Module):
    """SwiGLU or GEGLU (Shazeer 2020, arXiv 2002.05202), or GELU without a gate."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        linear = functools.partial(make_linear, bias=config.biases == "all", dtype=dtype, rngs=rngs)
        if config.ffn != "gelu":
            self.gate = linear(config.d_model, config.d_ff)
        self.up = linear(config.d_model, config.d_ff)
        self.down = linear(config.d_ff, config.d_model)

    def __call__(self, x_BTD):
        if self.config.ffn == "gelu":
            return self.down(jax.nn.gelu(self.up(x_BTD)))
        return self.down(ACTIVATIONS[self.config.ffn](self.gate(x_BTD)) * self.up(x_BTD))


class DecoderBlock(nnx.Module):
    """Pre-norm attention, then pre-norm feed-forward, each added to the residual stream."""

    def __init__(self, config: Config, layer: int, *, dtype, rngs: nnx.Rngs):
        self.config = config
        norm = functools.partial(Norm, config, config.d_model, dtype=dtype)
        self.attention_norm, self.ffn_norm = norm(), norm()
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.ffn = (Experts if config.num_experts else FeedForward)(config, dtype=dtype, rngs=rngs)
        if config.post_norms:
            self.attention_post_norm, self.ffn_post_norm = norm(), norm()

    def __call__(
        self,
        x_BTD,
        context: Context,
        cached: Sequence[kv.Segment],
        earlier: KeysValues | None,
        skips: tuple[bool | Array, bool | Array] = (False, False),
    ):
        """Returns the output, and the block's keys and values with those of these tokens.

        `skips` says whether attention and feed-forward are left out: True, so that they are not
        run, and the keys and values are `earlier`; or [B], so that they count in some rows only.
        """
        block, (skips_attention, skips_ffn) = earlier or (None, None), skips
        if skips_attention is not True:
            attended, block = self.attention(self.attention_norm(x_BTD), context, cached, earlier)
            if self.config.post_norms:
                attended = self.attention_post_norm(attended)
            x_BTD = x_BTD + _unless(skips_attention, attended)
        if skips_ffn is not True:
            fed = two_rows(self.ffn, self.ffn_norm(x_BTD))
            if self.config.post_norms:
                fed = self.ffn_post_norm(fed)
            x_BTD = x_BTD + _unless(skips_ffn, fed)
        return x_BTD, block


def _unless(skips: bool | Array, x_BTD: Array) -> Array:
    """Returns x, or zeros in rows that leave it out."""
    return x_BTD if skips is False else jnp.where(skips[:, None, None], 0, x_BTD)
