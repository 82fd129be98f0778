"""Tests of index arithmetic on trees, against loops in plain Python."""

import functools

import jax
import numpy as np
import pytest

from spsjax import tree


@jax.jit
def ancestors_and_depths(parents):
    return tree.ancestors(parents), tree.depths(parents)


@functools.partial(jax.jit, static_argnums=0)
def of_chains(nodes):
    """Returns ancestors and depths of two chains."""
    return ancestors_and_depths(tree.chain(2, nodes))


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
    above, depths = jax.device_get(ancestors_and_depths(parents))
    for row in range(5):
        for node in range(nodes + 1):
            path = path_to_root(parents[row], node)
            assert np.flatnonzero(above[row, node]).tolist() == sorted(path)
            assert depths[row, node] == len(path) - 1


def test_chain_has_consecutive_depths():
    above, depths = jax.device_get(of_chains(6))
    np.testing.assert_array_equal(depths, np.tile(np.arange(7), (2, 1)))
    np.testing.assert_array_equal(above[0], np.tril(np.ones((7, 7), bool)))


def test_chain_of_no_tokens_is_a_root():
    above, _ = of_chains(0)
    assert above.tolist() == [[[True]], [[True]]]


def test_along_takes_the_path_and_the_root_after_it():
    """`along` takes the nodes of the path, and the root where the path has ended."""
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    path = np.asarray([[0, 2, -1], [0, 1, 3]])
    taken = np.asarray(jax.jit(tree.along, static_argnums=2)(path, array, 2))
    np.testing.assert_array_equal(taken[0], array[0][:, [0, 2, 0]])
    np.testing.assert_array_equal(taken[1], array[1][:, [0, 1, 3]])
