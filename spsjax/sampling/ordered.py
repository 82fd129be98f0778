"""Unsigned integers in the order of floats, among which thresholds are searched bit by bit."""

import jax.numpy as jnp
from jax import lax

from spsjax.types import Array


def integers(x: Array) -> Array:
    """Returns unsigned integers in the order of the floats; -0.0 and 0.0 become the same."""
    integer = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), integer)
    sign = _sign(integer)
    # IEEE 754: the bits of positive floats grow with the float, those of negative floats shrink.
    return jnp.where(bits >= sign, ~bits, bits | sign)


def floats(order: Array) -> Array:
    """Returns the float32 whose `integers` are these; a NaN where there is none."""
    sign = _sign(order.dtype)
    return lax.bitcast_convert_type(jnp.where(order >= sign, order ^ sign, ~order), jnp.float32)


def _sign(integer) -> Array:
    return jnp.ones((), integer) << (jnp.dtype(integer).itemsize * 8 - 1)
