"""Index arithmetic on trees of draft tokens, given by the parents of their nodes.

Nodes are numbered as in `types`: node 0 is the root, node 1 + n is draft token n, whose parent is
`parents[b, n]`, a smaller number. All functions are pure and have static shapes; the trees
themselves may differ from row to row and from round to round.
"""

import jax.numpy as jnp

from spsjax.types import Array


def chain(batch: int, num_nodes: int) -> Array:
    """Returns the parents [B, N] of a chain: each draft token follows the one before it."""
    return jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), (batch, num_nodes))


def ancestors(parents_BN: Array) -> Array:
    """Returns [B, M, M] bool: whether node j is node i or above it, at [b, i, j]."""
    B, N = parents_BN.shape
    node = jnp.arange(N + 1)
    root = jnp.zeros((B, 1), parents_BN.dtype)
    parents = jnp.concatenate([root, parents_BN], axis=1)
    within = (node == parents[..., None]) | (node == node[:, None])  # one step up, or none
    # Squaring doubles the number of steps; the root is its own parent.
    for _ in range(max(N, 1).bit_length()):
        steps = within.astype(jnp.float32)
        within = jnp.einsum("bij,bjk->bik", steps, steps) > 0.5
    return within


def depths(parents_BN: Array) -> Array:
    """Returns [B, M] int32: how many steps each node is below the root."""
    return jnp.sum(ancestors(parents_BN), axis=-1, dtype=jnp.int32) - 1


def reached(parents_BN: Array, accepted_BN: Array) -> Array:
    """Returns [B, M] bool: the root, and the nodes that are accepted as are all above them."""
    accepted = jnp.pad(accepted_BN, ((0, 0), (1, 0)), constant_values=True)
    return jnp.all(accepted[:, None] | ~ancestors(parents_BN), axis=2)


def along(path_BP: Array, array: Array, axis: int = 1) -> Array:
    """Returns the entries of `array` [B, ..., M, ...] at the path's nodes: [B, ..., P, ...].

    Nodes are on axis `axis`. Where the path has ended, at -1, the root's entry stands.
    """
    index = jnp.maximum(path_BP, 0)
    index = index.reshape(
        index.shape[0], *[1] * (axis - 1), index.shape[1], *[1] * (array.ndim - axis - 1)
    )
    return jnp.take_along_axis(array, index, axis=axis)


def siblings(parents_BN: Array) -> Array:
    """Returns [B, N, N] bool: whether two draft tokens have the same parent."""
    return parents_BN[:, :, None] == parents_BN[:, None]


def path_to(parents_BN: Array, node_B: Array) -> Array:
    """Returns the path [B, M] from the root to a node: the nodes in order, then -1."""
    above = ancestors(parents_BN)
    on_path = jnp.take_along_axis(above, node_B[:, None, None], axis=1)[:, 0]
    column = jnp.arange(above.shape[1], dtype=jnp.int32)
    depth = jnp.sum(above, axis=2) - 1  # each node of the path has its own
    here = on_path[:, :, None] & (depth[:, :, None] == column)
    return jnp.max(jnp.where(here, column[:, None], -1), axis=1)


def turns(parents_BN: Array) -> Array:
    """Returns [B, M] int32: when a depth-first walk leaves each node, for the last time, in 0..N.

    The walk takes the children of a node in their order. It leaves the root last.
    """
    above = ancestors(parents_BN)
    size = jnp.sum(above, axis=1, dtype=jnp.int32)  # nodes of the subtree
    earlier = jnp.tril(siblings(parents_BN), -1)
    before = jnp.sum(jnp.where(earlier, size[:, None, 1:], 0), axis=2)  # in earlier siblings' trees
    before = jnp.pad(before, ((0, 0), (1, 0)))
    return jnp.sum(jnp.where(above, before[:, None], 0), axis=2) + size - 1
