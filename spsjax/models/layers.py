"""Decoder blocks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from spsjax.models import caches as kv
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.delta import GatedDeltaNet
from spsjax.models.experts import Experts
from spsjax.models.feed_forward import FeedForward
from spsjax.models.latent import LatentAttention
from spsjax.models.layer_inputs import LayerInput
from spsjax.models.linear import two_rows
from spsjax.models.norm import Norm
from spsjax.models.scaled_experts import ScaledExperts
from spsjax.models.self_attention import Attention
from spsjax.models.shared_attention import SharedAttention
from spsjax.types import Array

# How the tokens of a layer read earlier ones, by `Config.mixer`. A mixer is called as `Attention`.
MIXERS = {
    "attention": Attention,
    "latent": LatentAttention,
    "delta": GatedDeltaNet,
    "shared": SharedAttention,
}
# Mixtures of experts, by `Config.router`.
MIXTURES = {"softmax": Experts, "sigmoid": Experts, "scaled": ScaledExperts}


class DecoderBlock(nnx.Module):
    """Decoder block: pre-norm attention and pre-norm feed-forward, with residual connections.

    `config` is the layer's own (`Config.layer`).
    """

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        norm = functools.partial(Norm, config, config.d_model, dtype=dtype)
        self.attention_norm, self.ffn_norm = norm(), norm()
        self.attention = MIXERS[config.mixer](config, dtype=dtype, rngs=rngs)
        ffn = MIXTURES[config.router] if config.num_experts else FeedForward
        self.ffn = ffn(config, dtype=dtype, rngs=rngs)
        if config.post_norms:
            self.attention_post_norm, self.ffn_post_norm = norm(), norm()
        if config.layer_inputs:
            self.input = LayerInput(config, dtype=dtype, rngs=rngs)
        if config.output_scale:
            self.scale = nnx.Param(jnp.ones(1, dtype))

    def __call__(
        self,
        x_BTD,
        context: Context,
        cached: Sequence[kv.Segment],
        earlier: KeysValues | None,
        skips: tuple[bool | Array, bool | Array] = (False, False),
        inputs_BTI: Any = None,
    ):
        """Returns the output, and the block's keys and values including those of these tokens.

        `skips` says whether attention and feed-forward are skipped. True: the sub-layer does not
        run, and without attention the keys and values are `earlier`. [B] bool: the sub-layer runs,
        but does not change the stream of these rows. `inputs_BTI` are the layer's own inputs. They
        and the factor of the output belong to the feed-forward.
        """
        block, (skips_attention, skips_ffn) = earlier or (None, None), skips
        if skips_attention is not True:
            read = self.attention_norm(x_BTD), context, cached, earlier
            attended, block = self.attention(*read)
            if self.config.post_norms:
                attended = self.attention_post_norm(attended)
            x_BTD = x_BTD + _unless(skips_attention, attended)
        if skips_ffn is not True:
            fed = two_rows(self.ffn, self.ffn_norm(x_BTD), x_BTD)
            if self.config.post_norms:
                fed = self.ffn_post_norm(fed)
            x_BTD = x_BTD + _unless(skips_ffn, fed)
            if self.config.layer_inputs:
                x_BTD = x_BTD + _unless(skips_ffn, self.input(x_BTD, inputs_BTI))
            if self.config.output_scale:
                scale = self.scale[...].astype(x_BTD.dtype)
                if skips_ffn is not False:
                    scale = jnp.where(skips_ffn[:, None, None], 1, scale)
                x_BTD = x_BTD * scale
        return x_BTD, block


def _unless(skips: bool | Array, x_BTD: Array) -> Array:
    """Returns x, with zeros in rows that skip the sub-layer."""
    return x_BTD if isinstance(skips, bool) else jnp.where(skips[:, None, None], 0, x_BTD)
