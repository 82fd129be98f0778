"""Checks of the arguments of standalone verification."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spsjax.errors import InputError, short_repr
from spsjax.types import AnyArray, Array

# How far the sum of a distribution may be from 1: bfloat16 has 8 bits.
_TOLERANCE = 0.02


def check_key(key: ArrayLike) -> None:
    """Raises InputError unless `key` is one JAX key, typed or raw."""
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    if not typed and (dtype, shape) != (raw.dtype, raw.shape):
        description = type(key).__name__ if dtype is None else f"{dtype} {list(shape)}"
        raise InputError(f"key: expected one key (jax.random.key), found {description}")


def as_array(name: str, value: ArrayLike) -> AnyArray:
    """Returns the value as an array of its own type, because JAX would wrap large integers."""
    if isinstance(value, jax.Array):
        return value
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        raise InputError(f"{name}: expected an array, found {short_repr(value)}") from None


def draft_tokens(
    name: str, value: ArrayLike, target_probs: ArrayLike, letter: str
) -> tuple[AnyArray, int]:
    """Returns draft tokens [B, N] and V; raises InputError unless tokens are ids in [-1, V)."""
    tokens = as_array(name, value)
    if tokens.ndim != 2 or not tokens.shape[0] or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(
            f"{name}: expected integers [B, {letter}], B >= 1, found {describe(tokens)}"
        )
    V = (0, *as_array("target_probs", target_probs).shape)[-1]
    if V and (wrong := _outside(tokens, -1, V)) is not None:
        raise InputError(f"{name}: expected ids in [-1, {V}), found {wrong}")
    return tokens, V


def parents(value: ArrayLike, tokens: AnyArray, num_nodes: int) -> AnyArray:
    """Returns the parents [B, N] of draft tokens.

    Raises InputError unless each parent has a smaller number than its child, and is one of the
    first `num_nodes` nodes.
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


def num_nodes(draft_probs: ArrayLike) -> int:
    """Returns P of draft probabilities [B, P, V]; raises InputError for other axes."""
    probs = as_array("draft_probs", draft_probs)
    if probs.ndim != 3:
        raise InputError(f"draft_probs: expected floats [B, P, V], found {describe(probs)}")
    return probs.shape[1]


def check_distinct(tokens_BN: AnyArray, parents_BN: AnyArray) -> None:
    """Raises InputError if a node has two children with one token; traced values pass."""
    if isinstance(tokens_BN, jax.core.Tracer) or isinstance(parents_BN, jax.core.Tracer):
        return
    tokens_BN, parents_BN = np.asarray(tokens_BN), np.asarray(parents_BN)
    twins = tokens_BN[:, :, None] == tokens_BN[:, None]
    twins &= parents_BN[:, :, None] == parents_BN[:, None]
    twins &= np.triu(np.ones(twins.shape[1:], bool), 1) & (tokens_BN >= 0)[:, None]
    if twins.any():
        row, first, _ = np.argwhere(twins)[0]
        raise InputError(
            "tokens: expected siblings that differ, because they were drawn without replacement, "
            f"found {tokens_BN[row, first]} twice in row {row}. Else pass replacement=True"
        )


def depth(parents_BN: AnyArray) -> int:
    """Returns the greatest depth of a node; N if the parents are traced."""
    B, N = parents_BN.shape
    if isinstance(parents_BN, jax.core.Tracer):
        return N
    depths = np.zeros((B, N + 1), int)
    for n, parent in enumerate(np.asarray(parents_BN).T):
        depths[:, n + 1] = depths[np.arange(B), parent] + 1
    return int(depths.max())


def distributions(
    name: str,
    value: ArrayLike,
    shape: tuple[int, ...] | None = None,
    relevant: AnyArray | bool = True,
) -> Array:
    """Returns probabilities [..., V] in float32 or float64, because half precision sums badly.

    Raises InputError unless the shape fits and the rows where `relevant` is true are distributions.
    Non-finite rows pass, and `_TOLERANCE` allows for half precision. Traced values pass, too.
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


def _outside(array: AnyArray, least: int, end: int | np.ndarray) -> int | None:
    """Returns a number outside of [least, end); None: there is none, or the array is traced."""
    if isinstance(array, jax.core.Tracer):  # under jit the values are not known
        return None
    numbers = np.asarray(array)
    wrong = numbers[(numbers < least) | (numbers >= end)]
    return wrong[0] if wrong.size else None


def describe(array: AnyArray) -> str:
    """Returns a description of an array for messages: type and shape."""
    return f"{array.dtype} {list(array.shape)}"
