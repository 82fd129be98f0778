"""Tests of index arithmetic on trees, against loops in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax import tree


def random_parents(rng, rows, nodes):
    return np.stack([[rng.integers(0, n + 1) for n in range(nodes)] for _ in range(rows)])


def path_to_root(parents, node):
    path = [node]
    while path[-1]:
        path.append(int(parents[path[-1] - 1]))
    return path


@pytest.mark.parametrize("nodes", [1, 2, 7, 20])
def test_ancestors_and_depths_equal_walks_to_the_root(nodes):
    parents = random_parents(np.random.default_rng(nodes), 5, nodes)
    above = np.asarray(jax.jit(tree.ancestors)(jnp.asarray(parents)))
    depths = np.asarray(jax.jit(tree.depths)(jnp.asarray(parents)))
    for row in range(5):
        for node in range(nodes + 1):
            path = path_to_root(parents[row], node)
            assert np.flatnonzero(above[row, node]).tolist() == sorted(path)
            assert depths[row, node] == len(path) - 1


def test_chain_has_consecutive_depths():
    parents = tree.chain(2, 6)
    np.testing.assert_array_equal(tree.depths(parents), np.tile(np.arange(7), (2, 1)))
    np.testing.assert_array_equal(tree.ancestors(parents)[0], np.tril(np.ones((7, 7), bool)))


def test_chain_of_no_tokens_is_a_root():
    parents = tree.chain(2, 0)
    assert tree.ancestors(parents).tolist() == [[[True]], [[True]]]


def test_along_takes_the_path_and_the_root_after_it():
    """`along` takes the nodes of the path, and the root where the path has ended."""
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    path = jnp.asarray([[0, 2, -1], [0, 1, 3]])
    taken = tree.along(path, jnp.asarray(array), axis=2)
    np.testing.assert_array_equal(taken[0], array[0][:, [0, 2, 0]])
    np.testing.assert_array_equal(taken[1], array[1][:, [0, 1, 3]])
