"""The layers of a transformer, one after another.

They are unrolled: a loop over stacked weights would copy the weights of each layer on some
backends. Equal layers are traced once.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.models import pure
from spsjax.models.caches import KVCache, Segment
from spsjax.models.config import Config, Skipped
from spsjax.models.context import Context, KeysValues
from spsjax.models.layers import DecoderBlock
from spsjax.types import Array, Block, PyTree
from spsjax.utils import kernel_choice

# A barrier after every `_BARRIER_LAYERS` layers of a pass of `_BARRIER_TOKENS` or more. Without it,
# a compiler may keep the outputs of layers separately and add them up where the sum is needed. In a
# pass over a prompt they are large: for a 70B model, the TPU's compiler would keep 98 of 160, 1.6
# GB per chip at 1,024 tokens. In a short pass, a barrier costs more than it saves.
_BARRIER_LAYERS = 4
_BARRIER_TOKENS = 64


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
    inputs_BTLI: Array | None = None,
) -> tuple[Array, tuple[Array, ...], list[KeysValues]]:
    """Returns the final residual stream, the tapped streams, and the block's keys and values.

    Args:
        config: config of the model.
        weights: parameters of each layer.
        dtype: compute type.
        x_BTD: residual stream that enters the first layer.
        context: positions and masks.
        cache, block, tap_layers, remat, skipped: as for `transformer.apply`.
        inputs_BTLI: inputs of each layer (`layer_inputs`); None: the layers have none.
    """
    count = config.num_layers
    cached = cache.segments() if cache else [()] * count
    earlier = [None] * count if block is None else [*zip(block.keys, block.values)]
    rows: list[KeysValues] = []
    stream = [x_BTD]
    for layer in range(count):
        skips, skips_B2 = (False, False), None
        if isinstance(skipped, Skipped):
            skips = layer in skipped.attention, layer in skipped.ffn
        else:
            skips_B2 = skipped[:, layer]
        source = config.source(layer)
        x_BTD, row = _equal_block(
            config.layer(layer),
            jnp.dtype(dtype),
            remat,
            skips,
            weights[layer],
            stream[-1],
            context,
            cached[source],
            earlier[layer] if source == layer else rows[source],
            skips_B2,
            None if inputs_BTLI is None else inputs_BTLI[:, :, layer],
        )
        if x_BTD.shape[1] >= _BARRIER_TOKENS and layer % _BARRIER_LAYERS == _BARRIER_LAYERS - 1:
            x_BTD = lax.optimization_barrier(x_BTD)
        rows.append(row if source == layer else (None, None))
        stream.append(x_BTD)
    return stream[-1], tuple(stream[layer] for layer in tap_layers), rows


def _block(
    config: Config,
    dtype,
    remat: bool,
    skips: tuple[bool, bool],
    weights: PyTree,
    x_BTD: Array,
    context: Context,
    cached: Sequence[Segment],
    earlier: KeysValues | None,
    skips_B2: Array | None,
    inputs_BTI: Array | None,
) -> tuple[Array, KeysValues]:
    """Returns the output of one layer, and its keys and values of the block."""
    if skips_B2 is not None:
        skips = skips_B2[:, 0], skips_B2[:, 1]

    def apply(weights, x_BTD, context, cached, earlier, inputs_BTI):
        module = pure.bind(DecoderBlock, config, weights, dtype)
        return module(x_BTD, context, cached, earlier, skips, inputs_BTI)

    apply = jax.checkpoint(apply) if remat else apply
    is_whole = skips_B2 is None and not any(skips)
    kernels = kernel_choice.kernels_of("models.fused.layer") if is_whole else None
    if kernels is not None and kernels.supports(config, weights, x_BTD):
        apply = kernel_choice.chosen(functools.partial(kernels.apply, config, dtype), apply)
    return apply(weights, x_BTD, context, cached, earlier, inputs_BTI)


# Equal layers are traced once. The compiler sees one after another.
_equal_block = jax.jit(_block, static_argnums=range(4))
