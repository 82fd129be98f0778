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


def draft_tokens(name: str, value, target_probs, letter: str) -> tuple[Array, int]:
    """Returns draft tokens [B, N], and V; raises InputError unless they are ids in [-1, V)."""
    tokens = as_array(name, value)
    if tokens.ndim != 2 or not tokens.shape[0] or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(
            f"{name}: expected integers [B, {letter}], B >= 1, found {describe(tokens)}"
        )
    V = (0, *as_array("target_probs", target_probs).shape)[-1]
    if V and (wrong := _outside(tokens, -1, V)) is not None:
        raise InputError(f"{name}: expected ids in [-1, {V}), found {wrong}")
    return tokens, V


def parents(value, tokens: Array, num_nodes: int) -> Array:
    """Returns the parents [B, N] of draft tokens.

    Raises InputError unless a parent has a smaller number, and one of the `num_nodes` nodes that
    may have children.
    """
    parents = as_array("parents", value)
    if parents.shape != tokens.shape or not jnp.issubdtype(parents.dtype, jnp.integer):
        raise InputError(
            f"parents: expected integers {list(tokens.shape)}, found {describe(parents)}"
        )
    if isinstance(parents, jax.core.Tracer):
        return parents
    wrong = _outside(parents, 0, np.arange(1, parents.shape[1] + 1))
    if wrong is not None:
        raise InputError(f"parents: expected a node before its child, found {wrong}")
    wrong = _outside(parents, 0, num_nodes)
    if wrong is not None:
        raise InputError(
            f"parents: expected nodes below {num_nodes}, which draft_probs have, found {wrong}"
        )
    return parents


def num_nodes(draft_probs) -> int | None:
    """Returns P of draft probabilities [B, P, V], or None; raises InputError for other axes."""
    if draft_probs is None:
        return None
    probs = as_array("draft_probs", draft_probs)
    if probs.ndim != 3:
        raise InputError(f"draft_probs: expected floats [B, P, V], found {describe(probs)}")
    return probs.shape[1]


def check_distinct(tokens: Array, parents: Array) -> None:
    """Raises InputError if a token comes twice below one node, unless traced."""
    if isinstance(tokens, jax.core.Tracer) or isinstance(parents, jax.core.Tracer):
        return
    tokens, parents = np.asarray(tokens), np.asarray(parents)
    twins = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
    twins &= np.triu(np.ones(twins.shape[1:], bool), 1) & (tokens >= 0)[:, None]
    if twins.any():
        row, first, _ = np.argwhere(twins)[0]
        raise InputError(
            "tokens: expected siblings that differ, because they were drawn without replacement, "
            f"found {tokens[row, first]} twice in row {row}. Else pass replacement=True"
        )


def depth(parents: Array) -> int:
    """Returns the greatest depth of a node; N if the parents [B, N] are traced."""
    B, N = parents.shape
    if isinstance(parents, jax.core.Tracer):
        return N
    depths = np.zeros((B, N + 1), int)
    for n, parent in enumerate(np.asarray(parents).T):
        depths[:, n + 1] = depths[np.arange(B), parent] + 1
    return int(depths.max())


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


def _outside(array, least, end):
    """Returns a number that is not in [least, end), or None; None if it is traced."""
    if isinstance(array, jax.core.Tracer):  # under jit the values are not known
        return None
    numbers = np.asarray(array)
    wrong = numbers[(numbers < least) | (numbers >= end)]
    return wrong[0] if wrong.size else None


def describe(array) -> str:
    """Returns type and shape of an array, for a message."""
    return f"{array.dtype} {list(array.shape)}"
