"""The one decoder. A family of models is a `Config`; a new block is a flag, never a fork.

For now two families, both pre-norm with RMSNorm and without biases, the head tied or not:
  * Llama: rotary positions, SwiGLU, grouped-query attention (Touvron et al. 2023, arXiv 2302.13971
    and 2307.09288);
  * Gopher and Chinchilla: relative positions, GELU (Rae et al. 2021, arXiv 2112.11446; Hoffmann et
    al. 2022, arXiv 2203.15556).

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
from spsjax.errors import InputError, brief
from spsjax.models.attention import (
    attend,
    relative_positions,
    relative_scores,
    rope_angles,
    rotate,
)
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
    positions: str = "rotary"  # or "relative": Transformer-XL's, with a projection of their own
    ffn: str = "swiglu"  # or "gelu": two matrices
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
        for field, choices in (("positions", ("rotary", "relative")), ("ffn", ("swiglu", "gelu"))):
            if getattr(self, field) not in choices:
                raise InputError(
                    f"{field}: expected {' or '.join(choices)}, found {brief(getattr(self, field))}"
                )
        if self.positions == "relative" and self.d_model % 2:
            raise InputError(f"d_model: expected an even number, found {self.d_model}")


class Attention(nnx.Module):
    """Grouped-query attention: H query heads read G key-value heads."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        linear = functools.partial(_linear, dtype=dtype, rngs=rngs)
        size = config.head_dim
        self.query = linear(config.d_model, config.num_heads * size)
        self.key = linear(config.d_model, config.num_kv_heads * size)
        self.value = linear(config.d_model, config.num_kv_heads * size)
        self.out = linear(config.num_heads * size, config.d_model)
        if config.positions == "relative":
            self.position = linear(config.d_model, config.num_heads * size)
            zeros = jnp.zeros((config.num_heads, size), dtype)
            self.content_bias, self.position_bias = nnx.Param(zeros), nnx.Param(zeros)

    def __call__(self, x_BTD, positions_BT, mask_BTS, past: kv.Layer | None):
        """The output, and this layer's keys and values: of the cache if there is one."""
        config, (B, T, _) = self.config, x_BTD.shape
        # Without the barrier the TPU's compiler lets the layout of heads choose the
        # kernels', and keeps a second, transposed copy of each (2 GB a chip for 70B on 16 chips).
        query, key, value = jax.lax.optimization_barrier(
            (self.query(x_BTD), self.key(x_BTD), self.value(x_BTD))
        )
        query = query.reshape(B, T, config.num_heads, config.head_dim)
        key = key.reshape(B, T, config.num_kv_heads, config.head_dim)
        value = value.reshape(B, T, config.num_kv_heads, config.head_dim)
        bias = None
        if config.positions == "rotary":
            rope = rope_angles(positions_BT, config.head_dim, config.rope_theta)
            query, key = rotate(query, *rope), rotate(key, *rope)
        else:
            # Transformer-XL's four terms: (q + u) k and (q + v) r, with r of the distance alone.
            table = self.distances(T) if past is None else past.distances
            bias = relative_scores(query + self.position_bias[...], table, positions_BT)
            query = query + self.content_bias[...]
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        # A masked slot weighs zero, and zero times NaN is NaN: what is not finite moves from the
        # value to the key, where only those who see the slot meet it.
        finite = jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
        key, value = jnp.where(finite, key, jnp.nan), jnp.where(finite, value, 0)
        if past is not None:
            key = kv.write(past.keys, key, past.lengths)
            value = kv.write(past.values, value, past.lengths)
            if key.shape[1] % sharding.model_axis():
                key, value = sharding.by_rows(key), sharding.by_rows(value)
        mixed = attend(query, key, value, mask_BTS, bias)
        return self.out(mixed.reshape(B, T, -1)), key, value

    def distances(self, slots: int) -> Array:
        """[H, S, C]: what the distances S-1, ..., 0 are to each head."""
        positions = relative_positions(slots, self.config.d_model).astype(self.dtype)
        heads = self.position(positions).reshape(slots, -1, self.config.head_dim)
        return jnp.swapaxes(heads, 0, 1)


class FeedForward(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202), or GELU without a gate."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        linear = functools.partial(_linear, dtype=dtype, rngs=rngs)
        if config.ffn == "swiglu":
            self.gate = linear(config.d_model, config.d_ff)
        self.up = linear(config.d_model, config.d_ff)
        self.down = linear(config.d_ff, config.d_model)

    def __call__(self, x_BTD):
        if self.config.ffn == "gelu":
            return self.down(jax.nn.gelu(self.up(x_BTD)))
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
    """Pre-norm attention, then pre-norm feed-forward, each added to the residual stream."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, dtype, rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.ffn_norm = _norm(config, dtype, rngs)
        self.ffn = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD, positions_BT, mask_BTS, past):
        attended, key, value = self.attention(
            self.attention_norm(x_BTD), positions_BT, mask_BTS, past
        )
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

    def __call__(self, tokens_BT, positions_BT, mask_BTS, cache, remat=False) -> ModelOutput:
        x_BTD = self.embed(tokens_BT)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            past = cache and cache.layer(index)
            block = jax.checkpoint(layer) if remat else layer
            x_BTD, key, value = block(x_BTD, positions_BT, mask_BTS, past)
            if index % _SUMMED == _SUMMED - 1:
                x_BTD = jax.lax.optimization_barrier(x_BTD)
            keys.append(key)
            values.append(value)
        hidden = self.norm(x_BTD)
        logits = self.logits(hidden)
        if cache is not None:
            lengths = cache.lengths + tokens_BT.shape[1]
            cache = kv.KVCache(tuple(keys), tuple(values), lengths, cache.distances)
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

# Blocks whose outputs a compiler may keep, to add them up again where the sum is wanted. A TPU's
# would keep 98 of the 160 of a prompt of 70B: 1.6 GB a chip at 1,024 tokens.
_SUMMED = 8


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
    remat: bool = False,
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
        remat: keeps no activations of a block for its gradient, but computes them again.
    """
    tokens_BT = jnp.clip(tokens_BT, 0, config.vocab_size - 1)
    return _bind(config, params, dtype)(tokens_BT, positions_BT, mask_BTS, cache, remat)


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
    shape = (batch, config.num_kv_heads, slots, config.head_dim)
    distances = (None,) * config.num_layers
    if config.positions == "relative":
        layers = _bind(config, params).layers
        distances = tuple(layer.attention.distances(slots) for layer in layers)
    return kv.empty(config.num_layers, shape, dtype, distances)


def num_params(params: PyTree) -> int:
    """Parameters in all; a tied head counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
