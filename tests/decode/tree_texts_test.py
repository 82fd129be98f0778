"""Sampled trees in spsjax's own loop: the distribution of whole texts is the target's, to 1e-12.

`tree_enumeration` enumerates trees and verdicts of one round, here with the loop's step in the
place of the bare rule: the draft model draws the tree through its cache, the target scores it
through its own, and the round is cut at an end of sequence and at the limit.
"""

import itertools
import types

import jax
import numpy as np
import pytest
from helpers import (
    drafting,
    enumeration,
    reference,
    table_drafters,
    table_model,
    tree_enumeration,
)

from spsjax import Tree, decode, tree, verifiers
from spsjax.drafters import draft_model
from spsjax.loading import LoadedDrafter

VOCAB, END = 3, 2
TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


class Rounds:
    """The rounds after every prefix, on every tree that can be drawn there.

    It is what `tree_enumeration.Verification` is for a bare rule.
    """

    def __init__(self, loop, params):
        shape = loop.drafter.tree
        self.tree = tree_enumeration.Tree(shape.parents)
        self.vocab, self._loop = loop.vocab, loop
        self.rows, self._tokens, self.masses, self._middles = [], [], [], []
        model = table_model.model_of(loop.draft)
        self.prefixes, self._starts = loop.starts(params)
        for number, prefix in enumerate(self.prefixes):

            def distribution_of(context, prefix=prefix):
                return reference.to_probs(model((*prefix, *context)), **params)

            distinct = not shape.replacement
            for tokens, mass in tree_enumeration.trees(self.tree, distribution_of, distinct):
                self.rows.append(number)
                self._tokens.append(tokens)
                self.masses.append(mass)
                self._middles.append(self._numbers(tokens, distribution_of, distinct))
        self.masses = np.asarray(self.masses)
        self.rows = np.asarray(self.rows)

    def _numbers(self, tokens, distribution_of, distinct):
        """Returns the numbers that draw the tokens of a tree, from the middles of intervals."""
        left, numbers, contexts = {}, [], self.tree.contexts(tokens)
        for token, parent in zip(tokens, self.tree.parents):
            if token < 0:  # there is nothing to draw from
                numbers.append(0.5)
                continue
            probs = left.setdefault(parent, np.array(distribution_of(contexts[parent]), float))
            share = probs / probs.sum()
            numbers.append(np.cumsum(share)[token] - share[token] / 2)
            if distinct:
                probs[token] = 0
        return numbers

    def outcome(self, rows, accept, draws):
        """Returns proposal, state and verdict of some trees' rounds.

        `rows` [R] are trees, `accept` [R, N] and `draws` [R, M] numbers.
        """
        middles, draws = map(tree_enumeration.doubled, (np.asarray(self._middles)[rows], draws))
        starts = self._starts, self.rows[rows]
        return self._loop.step(*starts, middles, accept, draws)[2:]

    def __call__(self, *arrays):
        """Returns the verdicts on some trees; arguments as those of `outcome`."""
        proposal, _, verdict = self.outcome(*arrays)
        there = np.asarray(self._tokens)[arrays[0]]
        np.testing.assert_array_equal(proposal.tokens, there)
        return verdict


class Reported(Rounds):
    """The rounds of a drafter that is no table: its trees follow the `probs` that it reports.

    That they do is shown in `draws_test`.
    """

    def __init__(self, loop, params):
        shape = loop.drafter.tree
        self.tree, self._loop = tree_enumeration.Tree(shape.parents), loop
        self.vocab, N = loop.vocab, shape.num_nodes
        self.prefixes, self._starts = loop.starts(params)
        cases = itertools.product(range(len(self.prefixes)), *[range(self.vocab)] * N)
        cases = np.asarray(list(cases))
        rows, tokens = cases[:, 0], cases[:, 1:]
        middles, masses, R = np.full(tokens.shape, 0.5), np.ones(len(rows)), np.arange(len(rows))
        for node, parent in enumerate(shape.parents):
            numbers = (
                tree_enumeration.doubled(middles),
                0 * middles,
                np.zeros((len(rows), 2 * N + 2)),
            )
            probs = loop.step(self._starts, rows, *numbers)[2].probs[:, parent]
            left = np.array(probs)
            for sibling in range(node):
                if shape.parents[sibling] == parent and not shape.replacement:
                    left[R, tokens[:, sibling]] = 0
            share = left / left.sum(axis=1, keepdims=True)
            own = share[R, tokens[:, node]]
            middles[:, node] = np.cumsum(share, axis=1)[R, tokens[:, node]] - own / 2
            masses *= own
        real = masses > 0
        self.rows, self._tokens, self._middles = rows[real], tokens[real], middles[real]
        self.masses = masses[real]


def distribution(loop, rule, **params):
    """Returns new tokens -> probability."""
    is_table = isinstance(loop.drafter, draft_model.Drafter)
    rounds = (Rounds if is_table else Reported)(loop, params)
    nodes = range(1, len(rounds.tree.parents) + 1)
    if rule == "kseq":
        cases = tree_enumeration.decided_by_walk(rounds)
    else:
        order = {"traversal": rounds.tree.leaves_first(), "multipath": reversed(nodes)}
        cases = tree_enumeration.decided(rounds, order.get(rule, nodes))
    _, output, _ = rounds.outcome(cases.row, cases.accept, cases.draws)
    prefix_of = [rounds.prefixes[row] for row in rounds.rows[cases.row]]
    loop.check_caches(output)
    return loop.joint(prefix_of, cases.mass, output)


def loop_of(rule, shape, new, eos_ids, seed=0, drafter=None):
    if drafter is None:
        model = draft_model.Drafter(table_model.config(VOCAB), tree=shape)
        drafter = LoadedDrafter("", model, None)
    tables = (table_model.table(VOCAB, number) for number in (seed, seed + 1))
    return enumeration.Loop(drafter, *tables, 1 + new, eos_ids, verifier=verifiers.by_name(rule))


def error(loop, rule, **params):
    """Returns the largest difference from the target's distribution."""
    model = table_model.model_of(loop.target)
    expected = reference.joint_distribution(model, loop.prompt, loop.limit, loop.eos_ids, **params)
    return enumeration.distance(distribution(loop, rule, **params), expected)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("traversal", Tree((0, 0, 1))),
        pytest.param("kseq", Tree((0, 0, 2), replacement=True), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.parents)),
)
def test_sampled_trees_are_lossless_in_the_loop(rule, shape):
    """With an end of sequence, and with a limit of two tokens: both fall inside of paths."""
    assert error(loop_of(rule, shape, 2, (END,)), rule) < TOLERANCE


BRANCHES = Tree((0, 0, 1)), Tree((0, 0, 1), replacement=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule", "shape"),
    [
        *(
            (name, rule, BRANCHES[0])
            for name in drafting.BLOCKS
            for rule in ("recursive", "traversal")
        ),
        ("dspark", "kseq", BRANCHES[1]),
        ("dspark", "multipath", BRANCHES[1]),
        ("dflash2", "recursive", BRANCHES[1]),
    ],
)
def test_sampled_trees_of_blocks_are_lossless_in_the_loop(name, rule, shape):
    """Of marginals, of conditionals, and of conditionals with a recurrent state per node."""
    options = {"markov_kind": "rnn"} if name == "dspark" else {}
    drafter = table_drafters.head(name, 2, tree=shape, **options)
    with drafting.small_programs():
        assert error(loop_of(rule, shape, 2, (END,), drafter=drafter), rule) < TOLERANCE


@pytest.mark.slow
def test_filtered_trees_are_lossless_in_the_loop():
    """With top-k 2 the tree of three children has one that is missing."""
    loop = loop_of("traversal", Tree((0, 0, 0)), 2, (END,))
    assert error(loop, "traversal", top_k=2, temperature=0.7) < TOLERANCE


@pytest.mark.slow
def test_trees_scored_with_a_wrong_mask_are_rejected(monkeypatch):
    """Siblings that see each other, as the tokens of a chain do."""
    causal = np.tril(np.ones((4, 4), bool))
    faulty = types.SimpleNamespace(**vars(tree) | {"ancestors": lambda parents: causal[None]})
    monkeypatch.setattr(decode.step, "tree", faulty)
    enumeration._step.cache_clear()
    assert error(loop_of("traversal", Tree((0, 0, 1)), 2, (END,)), "traversal") > 0.01
    enumeration._step.cache_clear()
