"""The one decoder. A family of models is a `Config`; a new block is a flag, never a fork.

`families` says which there are, and `config` in what they differ.

Flax NNX modules live in this file and in `blocks`. Everything else sees `apply`, a pure function of
a plain nested dict of arrays. Layers are unrolled: scanning over stacked weights copies each slice
on some backends, and one code path is enough.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax import cache as kv
from spsjax.models.attention import capped
from spsjax.models.config import Config
from spsjax.models.layers import INIT, Block, Norm
from spsjax.types import Array, ModelOutput, PyTree


class Transformer(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        embed = functools.partial(
            nnx.Embed, dtype=dtype, param_dtype=dtype, embedding_init=INIT, rngs=rngs
        )
        self.embed = embed(config.vocab_rows, config.d_model)
        if config.positions == "learned":
            self.position_embed = embed(config.max_positions, config.d_model)
        self.layers = nnx.List(
            [Block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_layers)]
        )
        self.norm = Norm(config, config.d_model, dtype=dtype)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.d_model,
                config.vocab_rows,
                use_bias=False,
                dtype=dtype,
                param_dtype=dtype,
                kernel_init=INIT,
                rngs=rngs,
            )

    def __call__(self, tokens_BT, positions_BT, mask_BTS, cache, remat=False) -> ModelOutput:
        x_BTD = self.embed(tokens_BT)
        if self.config.embed_scale:
            x_BTD = x_BTD * jnp.asarray(self.config.d_model**0.5, x_BTD.dtype)
        if self.config.positions == "learned":
            last = self.config.max_positions - 1
            x_BTD = x_BTD + self.position_embed(jnp.minimum(positions_BT, last))
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
        logits = jnp.einsum(
            spec, hidden_BTD, kernel.astype(hidden_BTD.dtype), preferred_element_type=jnp.float32
        )
        return capped(logits[..., : self.config.vocab_size], self.config.logit_softcap)


# Blocks whose outputs a compiler may keep, to add them up again where the sum is wanted. A TPU's
# would keep 98 of the 160 of a prompt of 70B: 1.6 GB a chip at 1,024 tokens.
_SUMMED = 8


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
