"""Layers of block drafters, over the target's features and a block of tokens."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from spsjax.models import caches as kv
from spsjax.models.config import Config
from spsjax.models.context import context_of
from spsjax.models.layers import DecoderBlock
from spsjax.models.linear import make_linear
from spsjax.models.norm import Norm
from spsjax.parallel import sharding
from spsjax.types import Array, Block


class Backbone(nnx.Module):
    """Decoder layers over the target's features and a block of tokens.

    Args:
        drafter: the `blocks.BlockDrafter` whose weights these are.
    """

    def __init__(self, drafter: Any, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.drafter, config, width = drafter, drafter.config, drafter.target.d_model
        inputs = len(drafter.tap_layers) * width
        self.fc = make_linear(inputs, config.d_model, False, dtype=dtype, rngs=rngs)
        self.hidden_norm = Norm(config, config.d_model, dtype=dtype)
        own = map(config.layer, range(config.num_layers))
        self.layers = nnx.List([self.make_layer(drafter, layer, dtype, rngs) for layer in own])
        self.norm = Norm(config, config.d_model, dtype=dtype)
        if drafter.own_head:
            rows = drafter.vocab_size
            self.head = make_linear(config.d_model, rows, False, dtype=dtype, rngs=rngs)

    def make_layer(
        self, drafter: Any, layer: Config, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> DecoderBlock:
        """Returns a new layer of the config `layer`."""
        return DecoderBlock(layer, dtype=dtype, rngs=rngs)

    def fuse(self, taps_BTW: Array) -> Array:
        """Returns features [B, T, D] from the concatenated inputs of the target's tapped layers."""
        return self.hidden_norm(self.fc(sharding.whole_rows(taps_BTW)))

    def read(self, features_BTD: Array, cache: kv.KVCache | None) -> Block:
        """Returns the keys and values of features as a block, for positions after the cache.

        The features are the same for all layers, and are not normalised per layer.
        """
        context = context_of(features_BTD.shape[1], cache)
        rows = [
            context.append(None, *layer.attention.keys_values(features_BTD, context))
            for layer in self.layers
        ]
        return context.block(rows, len(features_BTD))

    def __call__(self, x_BPD: Array, cache: kv.KVCache) -> Array:
        """Returns the normalised outputs [B, P, D] of a block that follows the cache."""
        slots = jnp.arange(x_BPD.shape[1])
        ahead = (slots - slots[:, None])[None]
        reaches = [self.drafter.reach(index) for index in range(len(self.layers))]
        contexts = {
            reach: context_of(len(slots), cache, ancestors=ahead <= reach) for reach in set(reaches)
        }
        segments = cache.segments()
        for index, layer in enumerate(self.layers):
            x_BPD, _ = layer(x_BPD, contexts[reaches[index]], segments[index], None)
        return self.norm(x_BPD)


def default_tap_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns `count` layers of the target, evenly spaced, from a low to a high one.

    They are the authors' choice. For targets of fewer than 12 layers the highest one is the final
    state, because lower layers predict the next token less well.
    """
    last = num_layers - 2 if num_layers >= 12 else num_layers
    first = min(2, last)
    if count == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))
