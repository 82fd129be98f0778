"""Checks of distributions that a caller brings."""

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.errors import InputError, short_repr
from spsjax.types import Array

# How far the sum of a distribution may be from 1: bfloat16 has 8 bits.
_TOLERANCE = 0.02


def check_key(key) -> None:
    """Raises InputError unless `key` is one JAX key, typed or raw."""
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    old = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    if not new and (dtype, shape) != (old.dtype, old.shape):
        found = type(key).__name__ if dtype is None else f"{dtype} {list(shape)}"
        raise InputError(f"key: expected one key (jax.random.key), found {found}")


def as_array(name: str, value):
    """Returns the value as an array of its own type. (JAX would wrap a large integer.)"""
    if isinstance(value, jax.Array):
        return value
    try:
        return np.asarray(value)
    except ValueError:  # lists of several lengths
        raise InputError(f"{name}: expected an array, found {short_repr(value)}") from None


def distributions(name: str, value, shape: tuple | None = None, relevant=True) -> Array:
    """Returns probabilities [..., V] in float32 or more, since half precision cannot be summed.

    Checks their shape, and, where `relevant` and finite, that they are distributions, with a wide
    margin for half precision. Under `jit` the values are not known, and not checked.
    """
    probs = as_array(name, value)
    fits = probs.ndim and probs.shape[-1] and shape in (None, probs.shape)
    if not fits or not jnp.issubdtype(probs.dtype, jnp.floating):
        expected = "[..., V]" if shape is None else list(shape)
        raise InputError(f"{name}: expected floats {expected}, found {describe(probs)}")
    probs = jnp.asarray(probs)
    probs = probs.astype(jnp.promote_types(probs.dtype, jnp.float32))
    if not isinstance(probs, jax.core.Tracer) and not isinstance(relevant, jax.core.Tracer):
        total, least = (np.asarray(f(probs, axis=-1)) for f in (jnp.sum, jnp.min))
        wrong = ((least < 0) | (np.abs(total - 1) > _TOLERANCE)) & np.isfinite(total)
        wrong &= np.asarray(relevant)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0].tolist())
            raise InputError(
                f"{name}: expected probabilities >= 0 that sum to 1, found a least of "
                f"{least[at]:.4g} and a sum of {total[at]:.4g} at {list(at)}"
            )
    return probs


def describe(array) -> str:
    """Returns type and shape of an array, for a message."""
    return f"{array.dtype} {list(array.shape)}"
