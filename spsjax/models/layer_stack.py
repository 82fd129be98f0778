"""The layers of a transformer, one after another: unrolled, or in a loop.

Unrolled layers are compiled one by one. A loop is compiled once for all layers. Its body must not
copy the weights of each layer, as a scan over stacked weights does on CPUs. So the weights stay
where they are, and every product chooses its matrix with `lax.switch` (`products.LayerMatrix`). A
pass still takes longer than an unrolled one (docs/results.md), so that a loop has to be asked for:
`SPSJAX_LAYERS=loop`.
"""

import functools
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax.errors import InputError, short_repr
from spsjax.models import pure
from spsjax.models.caches import KVCache, Segment, layered
from spsjax.models.config import Config, Skipped
from spsjax.models.context import Context, KeysValues
from spsjax.models.layers import DecoderBlock
from spsjax.models.products import LayerMatrix
from spsjax.models.quantization import is_matrix
from spsjax.types import Array, Block, PyTree

# A barrier after every `_BARRIER_LAYERS` layers of a pass of `_BARRIER_TOKENS` or more. Without it,
# a compiler may keep the outputs of layers separately and add them up where the sum is needed. In a
# pass over a prompt they are large: for a 70B model, the TPU's compiler would keep 98 of 160, 1.6
# GB per chip at 1,024 tokens. In a short pass, a barrier costs more than it saves.
_BARRIER_LAYERS = 4
_BARRIER_TOKENS = 64
# Fewer layers are unrolled: they compile fast.
_LEAST_LOOPED = 12
VARIABLE, _METHODS = "SPSJAX_LAYERS", ("unrolled", "loop")


@functools.cache  # programs of one process must agree
def _asked_for() -> str:
    """Returns the method that the environment asks for; see `is_looped`."""
    method = os.environ.get(VARIABLE) or _METHODS[0]
    if method not in _METHODS:
        raise InputError(
            f"{VARIABLE}: expected {' or '.join(_METHODS)}, found {short_repr(method)}"
        )
    return method


def is_looped(config: Config) -> bool:
    """Returns whether decoding runs the layers of a model in a loop.

    It does if the environment asks for it (`SPSJAX_LAYERS=loop`), on a CPU without a mesh. Other
    devices decide about branches on the host, which would stall them in every product. Experts
    choose matrices in another way, and relative positions are projected by every layer for its
    cache.

    Raises:
        InputError: the environment asks for something else.
    """
    method = _asked_for()
    on_cpu = jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty
    uniform = not config.num_experts and config.positions != "relative"
    enough = config.num_layers >= _LEAST_LOOPED
    return method == "loop" and on_cpu and uniform and enough


def run(
    config: Config,
    weights: dict[int, PyTree],
    dtype,
    x_BTD: Array,
    context: Context,
    cache: KVCache | None,
    block: Block | None,
    tap_layers: Sequence[int] = (),
    remat: bool = False,
    skipped: Skipped | Array = Skipped(),
    looped: bool = False,
) -> tuple[Array, tuple[Array, ...], tuple[layered.Layered, layered.Layered]]:
    """Returns the final residual stream, the tapped streams, and the keys and values of the block.

    Args:
        config: config of the model.
        weights: parameters of each layer.
        dtype: compute type.
        x_BTD: residual stream that enters the first layer.
        context: positions and masks.
        cache, block, tap_layers, remat, skipped: as for `transformer.apply`.
        looped: whether the layers run in a loop, and keys and values are in one array.
    """
    # Sub-layers that do not run at all differ from layer to layer, which a loop does not allow.
    uniform = not isinstance(skipped, Skipped) or skipped == Skipped()
    if looped and uniform:
        inputs = x_BTD, context, cache, block, tap_layers, skipped
        return _loop(config, weights, jnp.dtype(dtype), *inputs)
    inputs = x_BTD, context, cache, block, tap_layers, remat, skipped
    x_BTD, streams, rows = _unroll(config, weights, jnp.dtype(dtype), *inputs)
    keys, values = (layered.joined(arrays, looped) for arrays in zip(*rows))
    return x_BTD, streams, (keys, values)


def _block(
    config: Config,
    dtype,
    remat: bool,
    skips: tuple[bool, bool],
    layer: int | Array,
    weights: PyTree,
    x_BTD: Array,
    context: Context,
    cached: Sequence[Segment],
    earlier: KeysValues | None,
    skips_B2: Array | None,
) -> tuple[Array, KeysValues]:
    """Returns the output of one layer, and its keys and values of the block."""
    if skips_B2 is not None:
        skips = skips_B2[:, 0], skips_B2[:, 1]

    def apply(weights, x_BTD, cached, earlier):
        module = pure.bind(DecoderBlock, config, weights, dtype)
        return module(x_BTD, context, cached, earlier, layer, skips)

    apply = jax.checkpoint(apply) if remat else apply
    return apply(weights, x_BTD, cached, earlier)


# Equal layers of an unrolled pass are traced once. The compiler sees one after another.
_equal_block = jax.jit(_block, static_argnums=range(5))


def _unroll(config, weights, dtype, x_BTD, context, cache, block, tap_layers, remat, skipped):
    """Runs the layers one after another; see `run`."""
    count, by_layer = config.num_layers, isinstance(skipped, Skipped)
    cached = cache.segments() if cache else [()] * count
    earlier = [None] * count
    if block is not None:
        earlier = [*zip(layered.as_list(block.keys), layered.as_list(block.values))]
    rows, stream = [], [x_BTD]
    for layer in range(count):
        skips = False, False
        if by_layer:
            skips = layer in skipped.attention, layer in skipped.ffn
        x_BTD, row = _equal_block(
            config,
            dtype,
            remat,
            skips,
            config.first_like(layer),
            weights[layer],
            stream[-1],
            context,
            cached[layer],
            earlier[layer],
            None if by_layer else skipped[:, layer],
        )
        if x_BTD.shape[1] >= _BARRIER_TOKENS and layer % _BARRIER_LAYERS == _BARRIER_LAYERS - 1:
            x_BTD = lax.optimization_barrier(x_BTD)
        rows.append(row)
        stream.append(x_BTD)
    return stream[-1], tuple(stream[layer] for layer in tap_layers), rows


def _loop(config, weights, dtype, x_BTD, context, cache, block, tap_layers, skipped):
    """Runs the layers in a loop; see `run`."""
    L, cached_of = config.num_layers, cache.by_layer() if cache else lambda layer: ()
    weights_of = _by_layer([weights[layer] for layer in range(L)])
    # A buffer has one entry per tapped layer. All other layers write to its last entry.
    tapped = sorted({layer for layer in tap_layers if layer < L})
    entries = np.full(L, len(tapped), np.int32)
    entries[tapped] = range(len(tapped))
    taps = jnp.zeros((len(tapped) + 1, *x_BTD.shape), x_BTD.dtype)

    def body(carry, inputs):
        x_BTD, taps = carry
        layer, entry, earlier, skips_B2 = inputs
        if tapped:
            taps = lax.dynamic_update_index_in_dim(taps, x_BTD, entry, 0)
        arguments = x_BTD, context, cached_of(layer), earlier, skips_B2
        own = False, (False, False), layer, weights_of(layer)
        x_BTD, rows = _block(config, dtype, *own, *arguments)
        return (x_BTD, taps), rows

    def leading(array_BL):
        return jnp.moveaxis(array_BL, 1, 0)

    earlier = None if block is None else (leading(block.keys), leading(block.values))
    skips_LB2 = None if isinstance(skipped, Skipped) else leading(skipped)
    inputs = jnp.arange(L), jnp.asarray(entries), earlier, skips_LB2
    (x_BTD, taps), rows = lax.scan(body, (x_BTD, taps), inputs)
    streams = tuple(x_BTD if layer == L else taps[entries[layer]] for layer in tap_layers)
    return x_BTD, streams, tuple(jnp.moveaxis(array, 0, 1) for array in rows)


def _by_layer(layers: Sequence[PyTree]):
    """Returns a function from a traced index to the weights of a layer.

    Vectors are stacked, because they are short. A matrix becomes a `LayerMatrix`.
    """

    def together(*leaves):
        is_vector = not is_matrix(leaves[0]) and leaves[0].ndim < 2
        return jnp.stack(leaves) if is_vector else leaves

    whole = jax.tree.map(together, *layers, is_leaf=is_matrix)

    def of_layer(layer):
        def choose(leaf):
            return LayerMatrix(leaf, layer) if isinstance(leaf, tuple) else leaf[layer]

        return jax.tree.map(choose, whole, is_leaf=lambda leaf: isinstance(leaf, tuple))

    return of_layer
