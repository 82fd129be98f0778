"""Random numbers: a key per row, and roles, so that no number is used twice."""

import jax
import jax.numpy as jnp

from spsjax.types import Array

# Roles of random numbers. A role is folded into a row's key.
DRAFT, ACCEPT, NEXT = range(3)

GENERATOR = "threefry2x32"


def row_keys(key: Array, rows: Array | int) -> Array:
    """Returns one key per row [B], which depends only on `key` and the index of the row.

    The keys are of the threefry generator, whatever `key` is: under `vmap`, other generators give
    every row the numbers of the first row's key.
    """
    if str(jax.random.key_impl(key)) != GENERATOR:
        data = jax.random.bits(key, (2,), jnp.uint32)
        key = jax.random.wrap_key_data(data, impl=GENERATOR)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))


def sample_key(seed: Array, row: Array) -> Array:
    """Returns key `row` of the `row_keys` of a seed, without the others."""
    return jax.random.fold_in(jax.random.key(seed, impl=GENERATOR), row)


def uniforms(keys_B: Array, role: int, count: int) -> Array:
    """Returns [B, count] float32 in [0, 1) for one role; number i does not depend on `count`."""

    def row(key):
        return jax.random.uniform(jax.random.fold_in(key, role), (count,), jnp.float32)

    return jax.vmap(row)(keys_B)
