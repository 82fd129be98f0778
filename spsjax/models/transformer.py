"""The one decoder. A family of models is a `Config`; a new block is a flag, never a fork.

For now the Llama family: pre-norm RMSNorm, rotary positions, SwiGLU, grouped-query attention,
tied or untied head (Touvron et al. 2023, arXiv 2302.13971 and 2307.09288).

Flax NNX modules live in this file only. Everything else sees `apply`, a pure function of a plain
nested dict of arrays. Layers are unrolled: scanning over stacked weights copies each slice on some
backends, and one code path is enough.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax import cache as kv
from spsjax import sharding
from spsjax.errors import InputError
from spsjax.types import Array, ModelOutput, PyTree


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder's shape. Hashable, so that it can be a static argument of `jit`."""

    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}: expected at least 1, found {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"found {self.num_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise InputError(f"head_dim: expected an even number, found {self.head_dim}")


def rope_angles(positions_BT: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosine and sine [B, T, 1, C/2] of the rotary embedding (Su et al. 2021, arXiv 2104.09864)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BT[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHC: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first half of each head against its second half, in float32."""
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)


class Attention(nnx.Module):
    """Grouped-query attention: H query heads read G key-value heads."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        linear = functools.partial(_linear, dtype=dtype, rngs=rngs)
        size = config.head_dim
        self.query = linear(config.d_model, config.num_heads * size)
        self.key = linear(config.d_model, config.num_kv_heads * size)
        self.value = linear(config.d_model, config.num_kv_heads * size)
        self.out = linear(config.num_heads * size, config.d_model)

    def __call__(self, x_BTD, rope, mask_BTS, cache):
        """`cache` is None or (keys, values, lengths) of this layer. Returns the output and both."""
        config, (B, T, _) = self.config, x_BTD.shape
        query = self.query(x_BTD).reshape(B, T, config.num_heads, config.head_dim)
        key = self.key(x_BTD).reshape(B, T, config.num_kv_heads, config.head_dim)
        value = self.value(x_BTD).reshape(B, T, config.num_kv_heads, config.head_dim)
        query, key = rotate(query, *rope), rotate(key, *rope)
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        # A masked slot weighs zero, and zero times NaN is NaN: what is not finite moves from the
        # value to the key, where only those who see the slot meet it.
        finite = jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
        key, value = jnp.where(finite, key, jnp.nan), jnp.where(finite, value, 0)
        if cache is not None:
            keys, values, lengths = cache
            key, value = kv.write(keys, key, lengths), kv.write(values, value, lengths)
            if key.shape[1] % sharding.model_axis():
                key, value = sharding.by_rows(key), sharding.by_rows(value)
        mixed = attend(query, key, value, mask_BTS)
        return self.out(mixed.reshape(B, T, -1)), key, value


def attend(query_BTHC: Array, keys_BGSC: Array, values_BGSC: Array, mask_BTS: Array) -> Array:
    """Softmax attention: [B, T, H, C]. The softmax is float32; masked slots weigh exactly zero."""
    (B, T, H, C), G = query_BTHC.shape, keys_BGSC.shape[1]
    if G % sharding.model_axis():
        # Heads that the mesh cannot split are on every device: each takes what its queries read.
        keys_BGSC, values_BGSC = (jnp.repeat(x, H // G, axis=1) for x in (keys_BGSC, values_BGSC))
        G = H
    query = query_BTHC.reshape(B, T, G, H // G, C).transpose(0, 2, 1, 3, 4)  # [B, G, T, H/G, C]
    # One query of several heads a key-value head: XLA's batched dot is slow at so few rows on CPUs,
    # and half of the time of a decode step's attention goes if it is a product and a sum instead.
    # With one head a key-value head it is the other way round.
    single = T == 1 and H > G
    if single:
        scores = jnp.sum(query.astype(jnp.float32) * keys_BGSC[:, :, :, None], axis=-1)
        scores = jnp.swapaxes(scores, 2, 3)[:, :, None]
    else:
        query = query.reshape(B, G, -1, C)
        scores = jnp.einsum("bgnc,bgsc->bgns", query, keys_BGSC, preferred_element_type=jnp.float32)
        scores = scores.reshape(B, G, T, H // G, -1)
    scores = jnp.where(mask_BTS[:, None, :, None], scores * C**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    if single:
        mixed = jnp.sum(weights[:, :, 0, :, :, None] * values_BGSC[:, :, None], axis=3)
    else:
        weights = weights.reshape(B, G, -1, weights.shape[-1]).astype(values_BGSC.dtype)
        mixed = jnp.einsum("bgns,bgsc->bgnc", weights, values_BGSC)
    mixed = mixed.astype(values_BGSC.dtype).reshape(B, G, T, H // G, C).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(B, T, H, C)


class FeedForward(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(_linear, dtype=dtype, rngs=rngs)
        self.gate = linear(config.d_model, config.d_ff)
        self.up = linear(config.d_model, config.d_ff)
        self.down = linear(config.d_ff, config.d_model)

    def __call__(self, x_BTD):
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
    """Pre-norm attention, then pre-norm feed-forward, each added to the residual stream."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, dtype, rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.ffn_norm = _norm(config, dtype, rngs)
        self.ffn = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD, rope, mask_BTS, cache):
        attended, key, value = self.attention(self.attention_norm(x_BTD), rope, mask_BTS, cache)
        x_BTD = x_BTD + attended
        return x_BTD + self.ffn(self.ffn_norm(x_BTD)), key, value


class Transformer(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.d_model,
            dtype=dtype,
            param_dtype=dtype,
            embedding_init=_INIT,
            rngs=rngs,
        )
        self.layers = nnx.List(
            [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = _norm(config, dtype, rngs)
        if not config.tie_embeddings:
            self.head = _linear(config.d_model, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BT, positions_BT, mask_BTS, cache) -> ModelOutput:
        rope = rope_angles(positions_BT, self.config.head_dim, self.config.rope_theta)
        x_BTD = self.embed(tokens_BT)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            past = cache and (cache.keys[index], cache.values[index], cache.lengths)
            x_BTD, key, value = layer(x_BTD, rope, mask_BTS, past)
            keys.append(key)
            values.append(value)
        hidden = self.norm(x_BTD)
        logits = self.logits(hidden)
        if cache is not None:
            lengths = cache.lengths + tokens_BT.shape[1]
            cache = kv.KVCache(tuple(keys), tuple(values), lengths)
        return ModelOutput(logits, hidden, cache)

    def logits(self, hidden_BTD) -> Array:
        """Logits [B, T, V] of final hidden states."""
        kernel, spec = (
            (self.embed.embedding[...], "btd,vd->btv")
            if self.config.tie_embeddings
            else (self.head.kernel[...], "btd,dv->btv")
        )
        # Float32 whatever the compute type: the sampler's ratios need the bits.
        return jnp.einsum(
            spec, hidden_BTD, kernel.astype(hidden_BTD.dtype), preferred_element_type=jnp.float32
        )


_INIT = nnx.initializers.normal(0.02)


def _linear(features_in: int, features_out: int, *, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=False,
        dtype=dtype,
        param_dtype=dtype,
        kernel_init=_INIT,
        rngs=rngs,
    )


def _norm(config: Config, dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.d_model, epsilon=config.norm_eps, dtype=dtype, param_dtype=dtype, rngs=rngs
    )


@functools.lru_cache
def _abstract(config: Config, dtype) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))


def param_shapes(config: Config, dtype=jnp.float32) -> PyTree:
    """The parameters as a nested dict of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.state(_abstract(config, jnp.dtype(dtype)), nnx.Param))


def init(config: Config, key: Array, dtype=jnp.float32) -> PyTree:
    """Random parameters as a nested dict of arrays."""
    model = Transformer(config, dtype=dtype, rngs=nnx.Rngs(key))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def apply(
    config: Config,
    params: PyTree,
    tokens_BT: Array,
    positions_BT: Array,
    mask_BTS: Array,
    cache: kv.KVCache | None = None,
    *,
    dtype=None,
) -> ModelOutput:
    """One forward pass.

    Args:
        config: the model's shape.
        params: as `init` gives them.
        tokens_BT: int tokens; ids are clipped to the vocabulary.
        positions_BT: the position of each token in its row.
        mask_BTS: bool, what each token sees: of the cache's slots (its own T tokens are written
            to slots `lengths .. lengths + T` first), or of the T tokens where there is no cache.
        cache: the keys and values of earlier tokens.
        dtype: compute type; None: the type of the parameters.
    """
    tokens_BT = jnp.clip(tokens_BT, 0, config.vocab_size - 1)
    return _bind(config, params, dtype)(tokens_BT, positions_BT, mask_BTS, cache)


def head(config: Config, params: PyTree, hidden_BTD: Array) -> Array:
    """Logits [B, T, V] of final hidden states, such as an earlier `apply` returned."""
    return _bind(config, params, hidden_BTD.dtype).logits(hidden_BTD)


def _bind(config: Config, params: PyTree, dtype=None) -> Transformer:
    """The model with these parameters; its compute type is theirs, if `dtype` is None."""
    if dtype is None:
        dtype = params["norm"]["scale"].dtype
    graph, state = nnx.split(_abstract(config, jnp.dtype(dtype)), nnx.Param)
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def empty_cache(config: Config, params: PyTree, batch: int, slots: int) -> kv.KVCache:
    """A cache for `batch` rows of `slots` tokens, in the type of the parameters."""
    dtype = params["norm"]["scale"].dtype
    heads, size = config.num_kv_heads, config.head_dim
    return kv.empty(config.num_layers, batch, slots, heads, size, dtype)


def num_params(params: PyTree) -> int:
    """Parameters in all; a tied head counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
