"""Index arithmetic on trees of draft tokens that are described by the parents of their nodes.

Nodes are numbered as in `types`: node 0 is the root, and node 1 + n is draft token n with parent
`parents[b, n]`, a smaller number. All functions are pure and have static shapes. The trees may
differ between rows and between rounds.
"""

import jax.numpy as jnp

from spsjax.types import Array


def chain(batch: int, num_nodes: int) -> Array:
    """Returns the parents [B, N] of a chain: each draft token follows the previous one."""
    return jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), (batch, num_nodes))


def ancestors(parents_BN: Array) -> Array:
    """Returns [B, M, M] bool; entry [b, i, j]: node j is node i or an ancestor of it."""
    B, N = parents_BN.shape
    node = jnp.arange(N + 1)
    root = jnp.zeros((B, 1), parents_BN.dtype)
    parents = jnp.concatenate([root, parents_BN], axis=1)
    reaches = (node == parents[..., None]) | (node == node[:, None])  # in at most one step up
    # Squaring the reachability matrix doubles the number of steps, so log2(M) products suffice.
    # The root is its own parent. Matrix products are faster than a loop on accelerators.
    for _ in range(max(N, 1).bit_length()):
        steps = reaches.astype(jnp.float32)
        reaches = jnp.einsum("bij,bjk->bik", steps, steps) > 0.5
    return reaches


def depths(parents_BN: Array) -> Array:
    """Returns the depth of each node [B, M] int32; the root has depth 0."""
    return jnp.sum(ancestors(parents_BN), axis=-1, dtype=jnp.int32) - 1


def reached(parents_BN: Array, accepted_BN: Array) -> Array:
    """Returns [B, M] bool: whether a node and all its ancestors are accepted; the root is."""
    accepted = jnp.pad(accepted_BN, ((0, 0), (1, 0)), constant_values=True)
    return jnp.all(accepted[:, None] | ~ancestors(parents_BN), axis=2)


def along(path_BP: Array, array: Array, axis: int = 1) -> Array:
    """Returns the entries of `array` [B, ..., M, ...] at the nodes of a path: [B, ..., P, ...].

    Nodes are on axis `axis`. After the end of the path, at -1, the result repeats the root's entry.
    """
    index = jnp.maximum(path_BP, 0)
    index = index.reshape(
        index.shape[0], *[1] * (axis - 1), index.shape[1], *[1] * (array.ndim - axis - 1)
    )
    return jnp.take_along_axis(array, index, axis=axis)


def siblings(parents_BN: Array) -> Array:
    """Returns [B, N, N] bool: whether two draft tokens have the same parent.

    A token is its own sibling.
    """
    return parents_BN[:, :, None] == parents_BN[:, None]


def path_to(parents_BN: Array, node_B: Array) -> Array:
    """Returns the path [B, M] from the root to a node: the nodes in order, then -1."""
    above = ancestors(parents_BN)
    on_path = jnp.take_along_axis(above, node_B[:, None, None], axis=1)[:, 0]
    column = jnp.arange(above.shape[1], dtype=jnp.int32)
    depth = jnp.sum(above, axis=2) - 1
    # The nodes of a path have different depths, so a node's depth is its column in the result.
    in_column = on_path[:, :, None] & (depth[:, :, None] == column)
    return jnp.max(jnp.where(in_column, column[:, None], -1), axis=1)


def postorder(parents_BN: Array) -> Array:
    """Returns the index of each node in the post-order of its tree [B, M] int32, in 0..N.

    Siblings keep their order, and the root comes last.
    """
    above = ancestors(parents_BN)
    size = jnp.sum(above, axis=1, dtype=jnp.int32)  # nodes of the subtree
    earlier = jnp.tril(siblings(parents_BN), -1)
    # The nodes before node i: the subtrees of earlier siblings of i and of i's ancestors, and the
    # size - 1 descendants of i.
    before = jnp.sum(jnp.where(earlier, size[:, None, 1:], 0), axis=2)
    before = jnp.pad(before, ((0, 0), (1, 0)))
    return jnp.sum(jnp.where(above, before[:, None], 0), axis=2) + size - 1
