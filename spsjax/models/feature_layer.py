"""Decoder layer of drafters that read features of the target."""

from collections.abc import Sequence

from flax import nnx

from spsjax.models import caches as kv
from spsjax.models.config import Config
from spsjax.models.context import Context
from spsjax.models.layers import FeedForward
from spsjax.models.linear import two_rows
from spsjax.models.norm import Norm
from spsjax.models.self_attention import Attention


class FeatureLayer(nnx.Module):
    """Decoder layer without an input norm, whose attention has an input of its own.

    `inputs` is the width of that input; None: the width of the residual stream.
    """

    def __init__(self, config: Config, inputs: int | None = None, *, dtype, rngs: nnx.Rngs):
        self.attention = Attention(config, inputs=inputs, dtype=dtype, rngs=rngs)
        self.ffn_norm = Norm(config, config.d_model, dtype=dtype)
        self.ffn = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD, read_BTI, context: Context, cached: Sequence[kv.Segment], earlier):
        """Returns the residual stream, and the block's keys and values including these tokens."""
        attended, block = self.attention(read_BTI, context, cached, earlier)
        x_BTD = x_BTD + attended
        return x_BTD + two_rows(self.ffn, self.ffn_norm(x_BTD)), block
