"""A decoder block as five operations, for decode steps of small models.

They are: norm, projections to heads, and rotation; attention; output projection and residual; norm,
gate and activation; and down projection and residual. `models.layers.DecoderBlock` specifies them.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from spsjax.models import attention, self_attention
from spsjax.models.caches import Segment
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.fused import heads, products, rows
from spsjax.models.fused.rows import Matrix, Scale
from spsjax.models.linear import ACTIVATIONS
from spsjax.models.quantization import Quantized
from spsjax.types import Array, PyTree

# Larger matrices take longer to read than kernels take to start.
_MOST_WEIGHTS = 2**24


def supports(config: Config, weights: PyTree, x_BTD: Array) -> bool:
    """Returns whether `apply` can compute a layer with this config for these tokens."""
    is_plain = config.mixer == "attention" and not (
        config.num_experts
        or config.post_norms
        or config.attention_gate
        or config.sinks
        or config.value_norm
        or config.value_is_key
        or config.layer_inputs
        or config.output_scale
    )
    is_rotated = config.positions == "rotary" and not config.rope_interleaved
    is_rotated = is_rotated and config.rotary_dim in (0, config.head_dim)
    return (
        is_plain
        and (is_rotated or config.positions == "learned")
        and not (config.qk_norm and config.norm == "layer")
        and config.head_dim % 2 == 0
        and config.head_dim <= heads.WIDEST
        and math.prod(x_BTD.shape[:2]) <= rows.MOST_ROWS
        and x_BTD.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and config.d_model * max(config.d_ff, config.num_heads * config.head_dim) <= _MOST_WEIGHTS
        and not _rounds_rows(weights)
    )


def apply(
    config: Config,
    dtype,
    weights: PyTree,
    x_BTD: Array,
    context: Context,
    cached: Sequence[Segment],
    earlier: KeysValues | None,
    inputs_BTI: None,
    interpret: bool = False,
) -> tuple[Array, KeysValues]:
    """Returns the output of a layer, and its keys and values of the block (`layer_stack`)."""
    B, T, D = x_BTD.shape
    own, ffn = weights["attention"], weights["ffn"]
    norm = functools.partial(_norm, config)
    x_RD = x_BTD.reshape(-1, D)
    angles = None
    if config.positions == "rotary":
        cos, sin = self_attention.angles_of(config, context.positions)
        shape = B, T, config.head_dim // 2
        cos, sin = (jnp.broadcast_to(side[:, :, 0], shape) for side in (cos, sin))
        angles = cos.reshape(B * T, -1), sin.reshape(B * T, -1)
    query, *block = heads.heads(
        x_RD,
        norm(weights["attention_norm"]),
        [_linear(own[name]) for name in ("query", "key", "value")],
        [norm(own[name]) if config.qk_norm else None for name in ("query_norm", "key_norm")],
        angles,
        config.head_dim,
        T,
        interpret,
    )
    block = context.appended(earlier, tuple(block))
    segments = context.segments(config, cached, *block)
    query = query.reshape(B, T, *query.shape[1:])
    biases = [None] * len(segments)
    mixed = attention.attend(query, segments, biases, *self_attention.limits(config))
    x_RD = products.added(mixed.reshape(B * T, -1), _linear(own["out"]), x_RD, interpret)
    hidden = products.activated(
        x_RD,
        norm(weights["ffn_norm"]),
        [_linear(ffn[name]) for name in ("gate", "up") if name in ffn],
        ACTIVATIONS.get(config.ffn, jax.nn.gelu),
        interpret,
    )
    x_RD = products.added(hidden, _linear(ffn["down"]), x_RD, interpret)
    return x_RD.reshape(B, T, D), block


def _rounds_rows(weights: PyTree) -> bool:
    """Returns whether a product quantises its rows."""
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return any(isinstance(leaf, Quantized) and leaf.dynamic for leaf in leaves)


def _linear(weights: Mapping) -> Matrix:
    """Returns the weights of a linear layer."""
    return Matrix.of(weights["kernel"], weights.get("bias"))


def _norm(config: Config, weights: Mapping) -> Scale:
    """Returns the weights of a norm."""
    return Scale(weights["scale"], weights.get("bias"), config.norm_offset, config.norm_eps)
