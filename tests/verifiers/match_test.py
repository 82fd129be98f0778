"""Matching on trees, by hand. That it is lossless is proven in `exactness_test`."""

import dataclasses

import jax
import numpy as np

import spsjax
from spsjax.verifiers import match

_walk = jax.jit(match.walk)


def walk(*args):
    """Returns the verdict of a walk, in NumPy."""
    return jax.device_get(_walk(*args))


def test_match_takes_the_first_of_twins_and_skips_holes():
    """One row by hand: two children with the same token, a hole above a leaf, one not eligible."""
    proposal = spsjax.Proposal(
        tokens=np.asarray([[5, 5, -1, 6, 7, 8]]),
        probs=None,
        parents=np.asarray([[0, 0, 0, 3, 2, 1]]),
        eligible=np.ones((1, 6), bool),
    )
    # Nodes 1 and 2 hold the drawn 5. Only node 2 has a child with the token that is drawn there.
    drawn, mass = np.asarray([[5, 9, 7, 6, 0, 0, 3]]), np.ones((1, 7), np.float32)
    verdict = walk(proposal, drawn, mass)
    assert verdict.path.tolist() == [[0, 1, -1, -1, -1, -1, -1]]
    assert verdict.tokens[0, :3].tolist() == [5, 9, -1] and int(verdict.num_tokens[0]) == 2
    refused = dataclasses.replace(proposal, eligible=np.asarray([[False] + [True] * 5]))
    verdict = walk(refused, drawn, mass)
    assert verdict.path[0, :3].tolist() == [0, 2, 5]
    assert verdict.tokens[0, :3].tolist() == [5, 7, 0]


def test_matching_stops_at_a_node_without_a_distribution():
    """The draw at such a node is arbitrary; a child that equals it must not be accepted."""
    proposal = spsjax.Proposal(np.asarray([[5, 6]]), None)
    for mass in (np.nan, 0.0):
        masses = np.asarray([[1, mass, 1]], np.float32)
        verdict = walk(proposal, np.asarray([[5, 6, 7]]), masses)
        assert verdict.path.tolist() == [[0, 1, -1]] and not verdict.valid[0]
        assert verdict.tokens.tolist() == [[5, -1, -1]] and verdict.num_tokens.tolist() == [1]
