"""Attention of layers without keys and values, which read those of an earlier layer (Gemma 3n)."""

import functools
from collections.abc import Sequence

from flax import nnx

from spsjax.models import caches as kv
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.linear import make_linear
from spsjax.models.norm import Norm
from spsjax.models.self_attention import Attention, limits
from spsjax.types import Array


class SharedAttention(Attention):
    """Queries that read the keys and values of another layer, the source (`Config.source`)."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        linear = functools.partial(make_linear, dtype=dtype, rngs=rngs)
        width, bias = config.num_heads * config.head_dim, config.biases
        self.query = linear(config.d_model, width * (1 + config.attention_gate), bias != "none")
        self.out = linear(width, config.d_model, bias in ("attention", "all"))
        if config.qk_norm:
            self.query_norm = Norm(config, config.head_dim, dtype=dtype)

    def _attend_arguments(
        self,
        x_BTD,
        context: Context,
        cached: Sequence[kv.Segment],
        earlier: KeysValues | None,
    ) -> tuple[tuple, KeysValues, Array | None]:
        """Returns the arguments of `attend`, nothing for the block, and the output gate.

        `cached` is the source's part of the cache, and `earlier` its part of the block, with these
        tokens.
        """
        assert earlier is not None  # the source runs before
        query, gate, sinks = self._queries(self.query(x_BTD), context)
        segments = context.segments(self.config, cached, *earlier)
        biases = [None] * len(segments)
        return (query, segments, biases, *limits(self.config), sinks), (None, None), gate
