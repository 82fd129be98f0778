"""The theory of trees, against brute force and against the loop-free enumeration of verdicts."""

import itertools

import jax
import numpy as np
import pytest
from helpers import reference, table_model, tree_enumeration
from helpers.bad_input import one_line

import spsjax
from spsjax import Tree, verifiers
from spsjax.performance import theory, tree_theory

RATES = 0.6, 0.15, 0.07


def laws(seed):
    def law(seed):
        model = table_model.model_of(table_model.table(3, seed, 4))
        return lambda context: reference.to_probs(model(context))

    return law(1000 + seed), law(seed)


def trees(num_nodes, depth, children):
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
        found = max((tokens(rates, tree) for tree in trees(nodes, depth, 3)), default=None)
        if found is None:
            with one_line("num_nodes", f"at most {depth} levels"):
                tree_theory.plan_tree(rates, nodes, depth)
            continue
        tree = tree_theory.plan_tree(rates, nodes, depth)
        assert tree.num_nodes == nodes and tree.depth <= depth
        assert tree_theory.tokens_per_call(rates, tree) == pytest.approx(found)
        assert tokens(rates, tree.parents) == pytest.approx(found)


def test_trees_of_one_child_per_node_are_chains():
    tree = tree_theory.plan_tree([0.8], 4, 6)
    assert tree == Tree.branching(1, 1, 1, 1)
    efficiency = theory.block_efficiency(0.8, 4)
    assert tree_theory.tokens_per_call([0.8], tree) == pytest.approx(efficiency)
    plan = tree_theory.planned(tree, [0.8], lambda rows: 0.1, lambda rows: 1.2)
    assert plan.speedup == pytest.approx(theory.speedup(0.8, 4, 0.1, 1.2))


def test_fastest_tree_depends_on_the_costs():
    """Free scoring asks for all nodes; scoring that costs as much per token asks for few."""
    free = tree_theory.best_plan(RATES, 12, lambda rows: 0.05, lambda rows: 1.0)
    dear = tree_theory.best_plan(RATES, 12, lambda rows: 0.05, lambda rows: float(rows))
    assert free.tree.num_nodes == 12 and free.tree.depth < 12 and free.speedup > 1.5
    assert dear.tree.num_nodes == 1 and dear.speedup < 1
    slow = tree_theory.best_plan(RATES, 12, lambda rows: 1.0, lambda rows: 1.0)
    assert slow.tree.depth == 1


same_trees = pytest.mark.xdist_group("exactness_test")  # whose rules verify trees of these shapes


# In the gate, a chain, and siblings with and without replacement. That the `accept_probs` of every
# rule are right is shown in `exactness_test`.
@same_trees
@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        ("rejection", Tree.branching(1, 1, 1)),
        ("recursive", Tree.branching(2, 1)),
        ("kseq", Tree.branching(2, 1, replacement=True)),
        *(
            pytest.param(rule, tree, marks=pytest.mark.slow)
            for rule, tree in (
                ("block", Tree.branching(1, 1, 1)),
                ("match", Tree((0, 0, 1, 1))),
                ("recursive", Tree((0, 0, 1, 1))),
                ("traversal", Tree((0, 0, 0, 0, 1))),
            )
        ),
    ],
)
def test_expected_tokens_are_those_of_the_enumeration(rule, tree):
    draft, target = laws(3)
    expected = tree_theory.expected_tokens(verifiers.by_name(rule), tree, draft, target)
    shape, nodes = tree_enumeration.Tree(tree.parents), [*range(1, tree.num_nodes + 1)]
    order = {"block": nodes[::-1], "traversal": shape.leaves_first()}.get(rule, nodes)
    with jax.enable_x64(True):
        verification = tree_enumeration.Verification(
            verifiers.by_name(rule), shape, draft, target, not tree.replacement
        )
        if rule in ("match", "kseq"):
            cases = tree_enumeration.decided_by_walk(verification)
        else:
            cases = tree_enumeration.decided(verification, order)
        distribution = tree_enumeration.emitted(verification, cases)
    assert expected == pytest.approx(tree_enumeration.expected_length(distribution), abs=1e-12)


@same_trees
def test_expected_tokens_of_token_rules_have_closed_forms():
    """For distributions that do not depend on the context: sums of minima and of products."""
    draft, target = np.asarray([0.2, 0.5, 0.3]), np.asarray([0.6, 0.3, 0.1])
    chain, pair = Tree.branching(1, 1, 1), (lambda context: draft, lambda context: target)
    for rule, rate in (
        ("rejection", theory.acceptance(target, draft)),
        ("match", theory.match_rate(target, draft)),
    ):
        expected = tree_theory.expected_tokens(verifiers.by_name(rule), chain, *pair)
        assert expected == pytest.approx(theory.block_efficiency(float(rate), 3), abs=1e-12)


def test_wrong_plans_are_refused_in_one_line():
    for rates in ([], [1.2], [[0.5]], [np.nan]):
        with one_line("rates", "probabilities"):
            tree_theory.plan_tree(rates, 3, 2)
    for nodes, depth in itertools.product((0, 2.0), (2,)):
        with one_line("num_nodes"):
            tree_theory.plan_tree(RATES, nodes, depth)
    draft, target = laws(0)
    with one_line("tree", "3 tokens at 14 nodes"):
        tree_theory.expected_tokens(
            verifiers.by_name("match"), Tree.branching(2, 2, 2), draft, target
        )
    with one_line("verifier"):
        tree_theory.expected_tokens(verifiers.by_name("kseq"), Tree.branching(2), draft, target)


RANKS = np.asarray([[0.6, 0.2, 0.1], [0.5, 0.1, 0.05], [0.3, 0.2, 0.0]])


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 6])
def test_tree_by_rank_is_the_best_of_all_trees(nodes):
    """Compared with every tree of so many nodes, at most three levels and three children."""
    shapes = [Tree(parents, chosen=True) for parents in trees(nodes, 3, 3)]
    best = max(tree_theory.tokens_by_rank(RANKS, tree) for tree in shapes)
    found = tree_theory.plan_by_rank(RANKS, nodes)
    assert found.num_nodes == nodes and found.chosen
    assert tree_theory.tokens_by_rank(RANKS, found) == pytest.approx(best)


def test_tokens_by_rank_by_hand():
    tree = Tree((0, 0, 1, 2, 3), chosen=True)
    expected = 1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.2 * 0.5 + 0.6 * 0.5 * 0.3
    assert tree_theory.tokens_by_rank(RANKS, tree) == pytest.approx(expected)


def test_fastest_trees_by_rank_weigh_levels_and_rows():
    """Levels that cost much are left out; sizes that no tree has are, too."""
    plans = tree_theory.plans_by_rank(RANKS, (2, 3, 100), lambda levels: 0.0, lambda rows: 1.0)
    assert set(plans) == {"tree of 2", "tree of 3"}
    assert plans["tree of 3"].tree.depth > 1
    flat = tree_theory.plans_by_rank(RANKS, (3,), lambda levels: 9.0 * levels, lambda rows: 1.0)
    assert flat["tree of 3"].tree.parents == (0, 0, 0)
    assert flat["tree of 3"].speedup == pytest.approx(1.9 / 10)
    for rates in ([0.5], [[1.5]], [[]]):
        with pytest.raises(
            spsjax.InputError, match=r"^rates: expected probabilities by depth and rank"
        ):
            tree_theory.plan_by_rank(rates, 1)
    with pytest.raises(spsjax.InputError, match="at most 39, for 3 levels of 3 children"):
        tree_theory.plan_by_rank(RANKS, 40)
