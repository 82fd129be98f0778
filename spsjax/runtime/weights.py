"""New weights in place of those that a compiled loop runs with."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.errors import InputError
from spsjax.types import PyTree

_HINT = " (the engine has weights in int8, and expects the same: spsjax.loading.quantized)"


def like(name: str, new: PyTree, old: PyTree) -> PyTree:
    """Returns copies of new weights with the types and the places of the old ones.

    Args:
        name: name of the argument, for messages.
        new: weights of any floating-point type, on any devices. Those of the matrices of an int8
            model are of the same types as the old ones.
        old: the weights that they replace.

    Raises:
        InputError: a weight is missing or left over, has another shape, or is no array of numbers
            that can be converted; the message names it.
    """
    if not isinstance(new, Mapping):
        raise InputError(
            f"{name}: expected weights by name, as Model.params, found {type(new).__name__}"
        )
    given, expected = _by_path(new), _by_path(old)
    hint = _HINT if any(leaf.dtype == jnp.int8 for leaf in expected.values()) else ""
    for path in sorted(given.keys() ^ expected.keys()):
        found = "one" if path in given else "none"
        needed = "none" if path in given else "one, as in the weights that are replaced"
        raise InputError(f"{name}: expected {needed} at {path}, found {found}{hint}")
    copies = [_copy(f"{name}: {path}", given[path], leaf) for path, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(old), copies)


def _copy(name: str, new, old: jax.Array) -> jax.Array:
    is_array = isinstance(new, jax.Array | np.ndarray)
    if not is_array or (isinstance(new, jax.Array) and new.is_deleted()):
        found = "a deleted one" if is_array else type(new).__name__
        raise InputError(f"{name}: expected an array, found {found}")
    if new.shape != old.shape:
        raise InputError(f"{name}: expected the shape {[*old.shape]}, found {[*new.shape]}")
    same = new.dtype == old.dtype
    if not same and (_is_integer(old) or not jnp.issubdtype(new.dtype, jnp.floating)):
        kind = old.dtype if _is_integer(old) else "numbers of a floating-point type"
        raise InputError(f"{name}: expected {kind}, found {new.dtype}")
    # A copy: training steps often use up the weights that they are given.
    return jax.device_put(jnp.array(new, old.dtype, copy=True), old.sharding)


def _is_integer(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer)


def _by_path(weights: PyTree) -> dict[str, jax.Array]:
    """Returns the leaves by their paths, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    names = ("key", "name", "idx")
    return {
        "/".join(
            str(next((getattr(key, name) for name in names if hasattr(key, name)), key))
            for key in path
        ): leaf
        for path, leaf in leaves
    }
