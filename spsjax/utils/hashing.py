"""Checksums of arrays and fingerprints of weights."""

import hashlib

import jax
import jax.numpy as jnp

from spsjax.types import PyTree


def params_fingerprint(params: PyTree) -> str:
    """Returns 16 hexadecimal digits that identify these weights."""
    return hashlib.sha256(repr(array_checksums(params)).encode()).hexdigest()[:16]


def array_checksums(state: PyTree) -> list[int]:
    """Returns one checksum per array. It depends on the order of elements, not on the sharding."""
    return [int(total) for total in jax.device_get(_sums(jax.tree.leaves(state)))]


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    return [_sum(leaf) for leaf in leaves]


def _sum(leaf: jax.Array) -> jax.Array:
    """Returns the sum modulo 2**32 of a hash of each element's bits and position."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
    position = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):
        iota = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        position = position * jnp.uint32(size) + iota
    # Elements are hashed (Wellons' lowbias32) before they are summed. Otherwise a pattern of
    # changes, such as two swapped elements, could cancel out.
    mixed = bits + position * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
