"""The theory of trees, against brute force."""

import numpy as np
import pytest
from helpers.bad_input import one_line

from spsjax import Tree
from spsjax.planning import theory, trees

RATES = 0.6, 0.15, 0.07


def all_trees(num_nodes, depth, children):
    """Yields the parents of every tree, level by level, of at most so many children and levels."""

    def grow(parents):
        if len(parents) == num_nodes:
            yield tuple(parents)
            return
        for parent in range(parents[-1] if parents else 0, len(parents) + 1):
            level, node = 1, parent
            while node:
                level, node = level + 1, parents[node - 1]
            if level <= depth and parents.count(parent) < children:
                yield from grow([*parents, parent])

    yield from grow([])


def tokens(rates, parents):
    """Returns the sum over all nodes of the products of the rates above them."""
    total, reached, seen = 1.0, [1.0], {}
    for parent in parents:
        reached.append(reached[parent] * rates[seen.get(parent, 0)])
        seen[parent] = seen.get(parent, 0) + 1
        total += reached[-1]
    return total


@pytest.mark.parametrize(
    "rates", (RATES, (0.3, 0.3, 0.1), (0.2, 0.5, 0.4), (0.9, 0.0, 0.0)), ids=str
)
@pytest.mark.parametrize("depth", (1, 2, 3, 5))
def test_planned_trees_are_the_best_of_all(rates, depth):
    """Compared with all trees of up to six nodes; rates need not fall from child to child."""
    for nodes in range(1, 7):
        best = max((tokens(rates, tree) for tree in all_trees(nodes, depth, 3)), default=None)
        if best is None:
            with one_line("num_nodes", f"at most {depth} levels"):
                trees.plan_tree(rates, nodes, depth)
            continue
        tree = trees.plan_tree(rates, nodes, depth)
        assert tree.num_nodes == nodes and tree.depth <= depth
        assert trees.tokens_per_call(rates, tree) == pytest.approx(best)
        assert tokens(rates, tree.parents) == pytest.approx(best)


def test_trees_of_one_child_per_node_are_chains():
    tree = trees.plan_tree([0.8], 4, 6)
    assert tree == Tree.branching(1, 1, 1, 1)
    efficiency = theory.block_efficiency(0.8, 4)
    assert trees.tokens_per_call([0.8], tree) == pytest.approx(efficiency)
    plan = trees.plans([0.8], [4], lambda rows: 0.1, lambda rows: 1.2)["tree of 4"]
    assert plan.tree == tree
    assert plan.speedup == pytest.approx(theory.speedup(0.8, 4, 0.1, 1.2))


@pytest.mark.parametrize(
    ("draft", "scoring", "name", "depth"),
    [
        (0.05, lambda rows: 1.0, "tree of 12", 3),
        (0.05, float, "chain", 1),
        (1.0, lambda rows: 1.0, "tree of 3", 1),
    ],
    ids=["free scoring", "costly scoring", "costly draft"],
)
def test_fastest_tree_depends_on_the_costs(draft, scoring, name, depth):
    """Free scoring asks for all nodes; scoring that costs as much per token asks for few."""
    plans = trees.plans(RATES, range(1, 13), lambda rows: draft, scoring)
    fastest = max(plans, key=lambda name: plans[name].speedup)
    assert (fastest, plans[fastest].tree.depth) == (name, depth)


def test_wrong_plans_are_refused_in_one_line():
    for rates in ([], [1.2], [[0.5]], [np.nan]):
        with one_line("rates", "probabilities"):
            trees.plan_tree(rates, 3, 2)
    for nodes in (0, 2.0):
        with one_line("num_nodes"):
            trees.plan_tree(RATES, nodes, 2)
    for rates in ([0.5], [[1.5]], [[]]):
        with one_line("rates: expected probabilities by depth and rank"):
            trees.plan_by_rank(rates, 1)
    with one_line("at most 39, for 3 levels of 3 children"):
        trees.plan_by_rank(RANKS, 40)


RANKS = np.asarray([[0.6, 0.2, 0.1], [0.5, 0.1, 0.05], [0.3, 0.2, 0.0]])


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 6])
def test_tree_by_rank_is_the_best_of_all_trees(nodes):
    shapes = [Tree(parents, chosen=True) for parents in all_trees(nodes, 3, 3)]
    best = max(trees.tokens_by_rank(RANKS, tree) for tree in shapes)
    planned = trees.plan_by_rank(RANKS, nodes)
    assert planned.num_nodes == nodes and planned.chosen
    assert trees.tokens_by_rank(RANKS, planned) == pytest.approx(best)


def test_tokens_by_rank_by_hand():
    tree = Tree((0, 0, 1, 2, 3), chosen=True)
    expected = 1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.2 * 0.5 + 0.6 * 0.5 * 0.3
    assert trees.tokens_by_rank(RANKS, tree) == pytest.approx(expected)


def test_fastest_trees_by_rank_weigh_levels_and_rows():
    """Levels that cost much are left out; sizes that no tree has are, too."""
    plans = trees.plans_by_rank(RANKS, (2, 3, 100), lambda levels: 0.0, lambda rows: 1.0)
    assert set(plans) == {"tree of 2", "tree of 3"}
    assert plans["tree of 3"].tree.depth > 1
    flat = trees.plans_by_rank(RANKS, (3,), lambda levels: 9.0 * levels, lambda rows: 1.0)
    assert flat["tree of 3"].tree.parents == (0, 0, 0)
    assert flat["tree of 3"].speedup == pytest.approx(1.9 / 10)
