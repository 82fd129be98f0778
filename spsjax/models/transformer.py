"""Decoder-only transformer for all model families. A family is a `Config` with other flags.

`hf.families` lists the families, and `config` the flags in which they differ.

Other modules use `apply`, a pure function of a nested dict of arrays; the Flax NNX modules are in
this file and in `layers`. `layer_stack` runs the layers one after another.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.errors import InputError
from spsjax.models import caches as kv
from spsjax.models import layer_stack, pure
from spsjax.models.attention import capped
from spsjax.models.config import Config, Skipped
from spsjax.models.context import Context, context_of
from spsjax.models.layer_inputs import LayerInputs
from spsjax.models.layers import DecoderBlock
from spsjax.models.linear import INIT, head_logits
from spsjax.models.norm import Norm
from spsjax.models.products import row_product
from spsjax.models.quantization import Quantized
from spsjax.parallel import sharding
from spsjax.types import Array, Block, ModelOutput, PyTree

# In passes of fewer tokens, all logits may be on every chip.
_LONG_TOKENS = 64


class Transformer(nnx.Module):
    """Decoder-only transformer.

    `apply` runs the layers, each of which it binds to its own weights. So it needs the module
    without layers.
    """

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs, has_layers: bool = True):
        self.config = config
        embed = functools.partial(
            nnx.Embed, dtype=dtype, param_dtype=dtype, embedding_init=INIT, rngs=rngs
        )
        self.embed = embed(config.vocab_rows, config.d_model)
        if config.positions == "learned":
            self.position_embed = embed(config.max_positions, config.d_model)
        if config.layer_inputs:
            self.inputs = LayerInputs(config, dtype=dtype, rngs=rngs)
        if has_layers:
            own = map(config.layer, range(config.num_layers))
            self.layers = nnx.List([DecoderBlock(layer, dtype=dtype, rngs=rngs) for layer in own])
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

    def first_stream(self, tokens_BT, context: Context) -> Array:
        """Returns the residual stream [B, T, D] that enters the first layer."""
        x_BTD = self.embedded(tokens_BT)
        if self.config.positions == "learned":
            last = self.config.max_positions - 1
            x_BTD = x_BTD + self.position_embed(jnp.minimum(context.positions, last))
        return x_BTD

    def embedded(self, tokens_BT) -> Array:
        """Returns the embeddings [B, T, D] of tokens, without their positions."""
        table = self.embed.embedding.get_value()
        quantized = isinstance(table, Quantized)
        dtype = self.norm.dtype
        x_BTD = table.rows(tokens_BT, dtype) if quantized else self.embed(tokens_BT)
        if self.config.embed_scale:
            x_BTD = x_BTD * jnp.asarray(self.config.d_model**0.5, x_BTD.dtype)
        return x_BTD

    def layer_inputs(self, tokens_BT) -> Array | None:
        """Returns the inputs [B, T, L, I] of each layer; None: the layers have none."""
        if not self.config.layer_inputs:
            return None
        return self.inputs(tokens_BT, self.embedded(tokens_BT))

    def logits(self, hidden_BTD) -> Array:
        """Returns the logits [B, T, V] of final hidden states."""
        if self.config.tie_embeddings:
            logits = head_logits(hidden_BTD, self.embed.embedding.get_value(), row_product)
        else:
            logits = head_logits(hidden_BTD, self.head.kernel.get_value())
        logits = sharding.split_rows(logits)
        has_padding = self.config.vocab_rows > self.config.vocab_size
        if has_padding and logits.shape[1] < _LONG_TOKENS:
            # Sharded logits would be resharded when the padding is dropped. That moves data
            # between all chips, and on a TPU the slice took longer than a pass of 8B parameters.
            logits = sharding.gather_vocab(logits)
        return capped(logits[..., : self.config.vocab_size], self.config.logit_softcap)


_WithoutLayers = functools.partial(Transformer, has_layers=False)


def param_shapes(config: Config, dtype=jnp.float32) -> PyTree:
    """Returns the parameters' shapes as a nested dict of `jax.ShapeDtypeStruct`."""
    # Equal layers are traced once.
    layers = {
        layer: pure.param_shapes(DecoderBlock, config.layer(layer), dtype)
        for layer in range(config.num_layers)
    }
    return pure.param_shapes(_WithoutLayers, config, dtype) | {"layers": layers}


def init(config: Config, key: Array, dtype=jnp.float32) -> PyTree:
    """Returns random parameters as a nested dict of arrays."""
    return pure.init(Transformer, config, key, dtype)


def apply(
    config: Config,
    params: PyTree,
    tokens_BT: Array,
    cache: kv.KVCache | None = None,
    *,
    block: Block | None = None,
    positions_BT: Array | None = None,
    ancestors: Array | None = None,
    tap_layers: tuple[int, ...] = (),
    dtype=None,
    remat: bool = False,
    num_logits: int | None = None,
    skipped: Skipped | Array = Skipped(),
) -> ModelOutput:
    """Runs one forward pass over T tokens per row, which attend to a cache and to a block.

    The pass reads the cache and does not change it. The block has the earlier nodes of the round,
    and these tokens are appended to it. A pass without a cache serves training and the start of a
    prompt.

    Args:
        config: config of the model.
        params: parameters in the form of `init`.
        tokens_BT: token ids, which are clipped to the vocabulary.
        cache: keys and values of the committed tokens; None: no cache.
        block: block to append to, with room for T more nodes (`empty_block`); None: a new block of
            these T tokens.
        positions_BT: position of each token in its row; None: consecutive, after cache and block.
        ancestors: nodes of the block to which each token attends [B or 1, T, P] bool, itself
            included; None: all nodes up to its own position.
        tap_layers: layers whose input is returned in `taps`; `num_layers` is the final stream.
        dtype: compute type; None: type of the parameters.
        remat: whether the backward pass recomputes the activations of each layer.
        num_logits: number of last tokens whose logits are computed; None: all.
        skipped: sub-layers that do not run, and add nothing to the block. Or [B, L, 2] bool: rows
            that skip the attention and feed-forward of each layer; then all sub-layers run.
    """
    for layer in tap_layers:
        if not 0 <= layer <= (L := config.num_layers):
            raise InputError(f"tap_layers: expected layers in [0, {L}], found {layer}")
    tokens_BT = jnp.clip(tokens_BT, 0, config.vocab_size - 1)
    context = context_of(tokens_BT.shape[1], cache, block, positions_BT, ancestors)
    model, dtype = _bind(config, params, dtype), dtype or _dtype(params)
    inputs = model.first_stream(tokens_BT, context), context, cache, block
    more = model.layer_inputs(tokens_BT)
    last_BTD, taps, rows = layer_stack.run(
        config, params["layers"], dtype, *inputs, tap_layers, remat, skipped, more
    )
    hidden = model.norm(last_BTD)
    first = 0 if num_logits is None else hidden.shape[1] - num_logits
    logits = model.logits(hidden[:, first:])
    return ModelOutput(logits, hidden, taps, context.block(rows, len(tokens_BT)))


def head(config: Config, params: PyTree, hidden_BTD: Array) -> Array:
    """Returns the logits [B, T, V] of final hidden states from an earlier `apply`."""
    return _bind(config, params, hidden_BTD.dtype).logits(hidden_BTD)


def exit_logits(config: Config, params: PyTree, stream_BTD: Array) -> Array:
    """Returns the logits [B, T, V] of an early exit: a residual stream, the final norm and head."""
    model = _bind(config, params, stream_BTD.dtype)
    return model.logits(model.norm(stream_BTD))


def head_kernel(config: Config, params: PyTree) -> Array:
    """Returns the matrix of the head [D, V], including the padding of the vocabulary."""
    tied = config.tie_embeddings
    matrix = params["embed"]["embedding"] if tied else params["head"]["kernel"]
    matrix = matrix.values() if isinstance(matrix, Quantized) else matrix
    return matrix.T if tied else matrix


def embed(config: Config, params: PyTree, tokens_BT: Array) -> Array:
    """Returns the embeddings [B, T, D] of tokens, which are clipped to the vocabulary."""
    return _bind(config, params).embedded(jnp.clip(tokens_BT, 0, config.vocab_size - 1))


def attention_received(
    config: Config, params: PyTree, tokens_BT: Array, counted_BT: Array, cache: kv.KVCache
) -> list[Array]:
    """Returns the attention [B, G, S] per layer that the slots of a cache receive from tokens.

    It is the sum over the counted tokens and over the query heads of each key-value head.

    Args:
        config, params: config and parameters of the model.
        tokens_BT: tokens that follow the cache.
        counted_BT: whether a token counts, bool.
        cache: keys and values of all earlier tokens.
    """
    tokens_BT = jnp.clip(tokens_BT, 0, config.vocab_size - 1)
    taps = apply(config, params, tokens_BT, cache, tap_layers=tuple(range(config.num_layers))).taps
    context, layers = context_of(tokens_BT.shape[1], cache), _layers(config, params)
    received = []
    inputs = zip(layers, taps, cache.segments(), strict=True)
    for layer, stream, cached in inputs:
        weights = layer.attention.weights(layer.attention_norm(stream), context, cached)[0]
        weights = jnp.where(counted_BT[:, None, :, None, None], weights, 0)
        total = jnp.sum(weights, axis=(2, 3))
        # Key-value heads that a mesh cannot split were repeated for each group of query heads.
        total = total.reshape(len(total), config.num_kv_heads, -1, total.shape[-1])
        received.append(jnp.sum(total, axis=2))
    return received


def _bind(config: Config, params: PyTree, dtype=None) -> Transformer:
    """Returns the model without its layers; `dtype` None: it computes in their type."""
    own = {name: weights for name, weights in params.items() if name != "layers"}
    return pure.bind(_WithoutLayers, config, own, dtype or _dtype(params))


def _layers(config: Config, params: PyTree) -> list[DecoderBlock]:
    """Returns the decoder blocks."""
    return [
        pure.bind(DecoderBlock, config.layer(layer), params["layers"][layer], _dtype(params))
        for layer in range(config.num_layers)
    ]


def empty_cache(config: Config, params: PyTree, batch: int, slots: int) -> kv.KVCache:
    """Returns a cache for `batch` rows of `slots` tokens, in the type of the parameters."""
    layers = _layers(config, params) if config.positions == "relative" else ()
    return cache_of_layers(config, layers, _dtype(params), batch, slots)


def num_slots(config: Config, slots: int) -> int:
    """Returns the number of slots of a model's cache for token buffers of `slots`."""
    return config.sinks + config.recent + kv.SLACK if config.recent else slots


def cache_of_layers(config: Config, layers, dtype, batch: int, slots: int) -> kv.KVCache:
    """Returns a cache for decoder blocks.

    The cache of a model that attends to recent tokens only has a fixed size, whatever `slots` is.
    """
    slots = num_slots(config, slots)
    distances = (None,) * config.num_layers
    if config.positions == "relative":
        distances = distances_of(layers, slots)
    sizes = kv.shapes(config, batch, slots), dtype, distances
    cache = kv.empty_window(*sizes, config.sinks) if config.recent else kv.empty(*sizes)
    return kv.with_states(config, cache, dtype)


def distances_of(layers, slots: int) -> tuple[Array, ...]:
    """Returns the projected distances [H, S, C] per layer (`caches.KVCache.distances`)."""
    return tuple(layer.attention.distances(slots) for layer in layers)


def empty_block(config: Config, params: PyTree, batch: int, nodes: int) -> Block:
    """Returns an empty block with room for `nodes` tokens per row, which `apply` fills."""
    dtype = _dtype(params)
    return kv.with_nodes(config, kv.empty_block(kv.shapes(config, batch, nodes), dtype), dtype)


def _dtype(params: PyTree):
    return params["norm"]["scale"].dtype


def repeat_layers(params: PyTree, num_layers: int) -> PyTree:
    """Returns the parameters of a deeper model, whose layer i is layer i mod L of this model.

    Repeated layers are copies, because a training step donates its buffers.
    """
    layers, L = params["layers"], len(params["layers"])
    copies = {layer: jax.tree.map(jnp.copy, layers[layer % L]) for layer in range(L, num_layers)}
    return params | {"layers": layers | copies}


def num_params(params: PyTree) -> int:
    """Returns the number of parameters; a tied head counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
