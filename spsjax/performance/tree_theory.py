"""Theory of draft trees: expected tokens per call, the best shape, and when trees are faster.

Costs are in passes of the target over one token, as in `theory`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from spsjax.drafters.shapes import Tree
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.types import Independent, Proposal
from spsjax.utils.compilation import compiled
from spsjax.verifiers.base import Verifier

# From a context, the draft tokens so far, to the distribution [V] of what follows.
Law = Callable[[tuple[int, ...]], np.ndarray]

_MOST_DRAFTS = 10**6  # that are enumerated


def expected_tokens(verifier: Verifier, tree: Tree, draft: Law, target: Law) -> float:
    """Returns the tokens per target call of a rule, exactly: over all drafts that can be drawn.

    Args:
        verifier: the rule, for drafts that are drawn from the draft's distributions.
        tree: shape of the draft. One that is a chain also fits the rules for chains.
        draft: distribution of the draft after each context.
        target: distribution of the target after each context.

    Raises:
        InputError: there are too many drafts to enumerate, or the rule does not fit them.
    """
    vocab, N = len(target(())), tree.num_nodes
    if vocab**N > _MOST_DRAFTS:
        raise InputError(
            f"tree: expected at most {_MOST_DRAFTS} drafts, found {vocab} tokens at {N} nodes"
        )
    drafts = list(_drafts(tree, draft))
    shape = len(drafts), N + 1, vocab
    draft_probs, target_probs = np.zeros(shape), np.full(shape, 1 / vocab)
    for row, (tokens, _) in enumerate(drafts):
        for node, context in enumerate(_contexts(tree, tokens)):
            if -1 not in context:
                draft_probs[row, node], target_probs[row, node] = draft(context), target(context)
    tokens, masses = map(np.asarray, zip(*drafts))
    with jax.enable_x64(True):
        accepted = _accepted(verifier, tree, tokens, draft_probs, target_probs)
    return float(1 + masses @ accepted)


def _accepted(verifier: Verifier, tree: Tree, tokens, draft_probs, target_probs) -> np.ndarray:
    """Returns [R]: how many tokens of each draft are accepted, in the mean."""
    R, N = tokens.shape
    tokens = tokens.astype(np.int32)
    if tree.depth == N:
        proposal = Proposal(tokens, draft_probs[:, :N])
    else:
        parents = np.tile(np.asarray(tree.parents, np.int32), (R, 1))
        kind = Independent if tree.replacement else Proposal
        proposal = kind(tokens, draft_probs, parents)
    verifier.check(proposal)
    probs, _ = compiled(type(verifier).accept_probs, verifier)(proposal, target_probs)
    return np.asarray(probs).sum(axis=1)


def _drafts(tree: Tree, draft: Law):
    """Yields the tokens of every draft and its probability; -1 where nothing is left to draw."""
    unfinished = [((), 1.0)]
    while unfinished:
        tokens, mass = unfinished.pop()
        if len(tokens) == tree.num_nodes:
            yield tokens, mass
            continue
        parent = tree.parents[len(tokens)]
        context = _contexts(tree, tokens)[parent]
        probs = np.zeros(1) if -1 in context else np.array(draft(context), float)
        if not tree.replacement:
            probs[[token for token, above in zip(tokens, tree.parents) if above == parent]] = 0
        total = probs.sum()
        if total == 0:
            unfinished.append(((*tokens, -1), mass))
        for token in np.flatnonzero(probs):
            unfinished.append(((*tokens, int(token)), mass * probs[token] / total))


def _contexts(tree: Tree, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the draft tokens from the root to each node."""
    contexts = [()]
    for token, parent in zip(tokens, tree.parents):
        contexts.append((*contexts[parent], token))
    return contexts


def tokens_per_call(rates: Sequence[float], tree: Tree) -> float:
    """Returns the tokens per target call of a tree, if every node behaves like every other.

    Args:
        rates: the probability that the b-th child of a node is accepted, if the node is.
        tree: a shape with at most that many children per node.
    """
    reached = np.ones(tree.num_nodes + 1)
    for children in tree.children:
        for rank, child in enumerate(children):
            reached[child] = reached[tree.parents[child - 1]] * rates[rank]
    return float(reached.sum())


def plan_tree(rates: Sequence[float], num_nodes: int, depth: int) -> Tree:
    """Returns the shape with most tokens per call (Sequoia, Chen et al. 2024, arXiv 2402.12374).

    It is found by the dynamic programme of section 3.1, over nodes, levels and children.

    Args:
        rates: the probability that the b-th child of a node is accepted, if the node is.
        num_nodes: N, draft tokens.
        depth: most levels below the root.

    Raises:
        InputError: rates are no probabilities, or no tree of that depth has so many nodes.
    """
    table = _Table(rates, num_nodes, depth)
    if not table.has(num_nodes, depth):
        raise InputError(
            f"num_nodes: expected a tree of at most {depth} levels and {len(rates)} children per "
            f"node, found {num_nodes} nodes"
        )
    return table.tree(num_nodes, depth)


def plan_by_rank(rates: np.ndarray, num_nodes: int) -> Tree:
    """Returns the tree of chosen tokens with most tokens per call (Medusa, 2401.10774, 2.3.3).

    It grows node by node, always by the one that is reached most often. A rate above that of the
    rank before counts as that one, which makes this the best tree where rates fall with the rank.

    Args:
        rates: [K, W] probability that the token of a rank is accepted at a depth, if all before it
            are: of the first draft token first, of the most probable token first.
        num_nodes: N, draft tokens.

    Raises:
        InputError: rates are no probabilities, or there is no such tree of so many nodes.
    """
    check_integer("num_nodes", num_nodes, 1)
    rates = np.asarray(rates, float)
    if rates.ndim != 2 or not rates.size or not np.all((rates >= 0) & (rates <= 1)):
        raise InputError(
            f"rates: expected probabilities by depth and rank, found {short_repr(rates.tolist())}"
        )
    # As rates fall, no node is reached more often than its parent or the sibling before it.
    rates = np.minimum.accumulate(rates, axis=1)
    reached, open_paths = {(): 1.0}, {(0,): rates[0, 0]}
    while len(reached) <= num_nodes:
        if not open_paths:
            raise InputError(
                f"num_nodes: expected at most {len(reached) - 1}, for {rates.shape[0]} levels of "
                f"{rates.shape[1]} children, found {num_nodes}"
            )
        path = max(open_paths, key=lambda path: (open_paths[path], -len(path)))
        reached[path] = open_paths.pop(path)
        if path[-1] + 1 < rates.shape[1]:
            depth = len(path) - 1
            rank = path[-1] + 1
            open_paths[*path[:-1], rank] = reached[path[:-1]] * rates[depth, rank]
        if len(path) < rates.shape[0]:
            open_paths[*path, 0] = reached[path] * rates[len(path), 0]
    order = sorted(reached, key=lambda path: (len(path), path))
    return Tree(tuple(order.index(path[:-1]) for path in order[1:]), chosen=True)


def tokens_by_rank(rates: np.ndarray, tree: Tree) -> float:
    """Returns the tokens per target call of a tree of chosen tokens; arguments as above."""
    reached = np.ones(tree.num_nodes + 1)
    for depth, level in enumerate(tree.levels[:-1]):
        for node in level:
            for rank, child in enumerate(tree.children[node]):
                reached[child] = reached[node] * rates[depth][rank]
    return float(reached.sum())


class _Table:
    """The best trees of all sizes up to a number of draft tokens and of levels."""

    def __init__(self, rates, num_nodes: int, depth: int):
        check_integer("num_nodes", num_nodes, 1)
        check_integer("depth", depth, 1)
        rates = np.asarray(rates, float)
        if rates.ndim != 1 or not len(rates) or not np.all((rates >= 0) & (rates <= 1)):
            found = short_repr(rates.tolist())
            raise InputError(f"rates: expected probabilities, one per child, found {found}")
        sizes = num_nodes + 2
        # tokens[levels][m]: of the best tree of m nodes, its root included, of at most so many
        # levels below the root; counts: its root's children. splits[levels][b][m]: nodes below the
        # root's last child, if it has b + 1 of them.
        self._tokens = [np.where(np.arange(sizes) == 1, 1.0, -np.inf)]
        self._counts, self._splits = [np.zeros(sizes, int)], [np.zeros((0, sizes), int)]
        for _ in range(depth):
            by_children, split = [self._tokens[0]], np.zeros((len(rates), sizes), int)
            for rank, rate in enumerate(rates):
                exists = self._tokens[-1] > 0
                child = np.where(exists, rate * np.where(exists, self._tokens[-1], 0), -np.inf)
                best = np.full(sizes, -np.inf)
                for size in range(2, sizes):
                    below = np.arange(1, size)
                    tokens = by_children[-1][size - below] + child[below]
                    split[rank, size], best[size] = below[np.argmax(tokens)], tokens.max()
                by_children.append(best)
            self._tokens.append(np.max(by_children, axis=0))
            self._counts.append(np.argmax(by_children, axis=0))
            self._splits.append(split)

    def has(self, num_nodes: int, depth: int) -> bool:
        """Returns whether there is a tree of so many draft tokens and at most so many levels."""
        return bool(self._tokens[depth][num_nodes + 1] > -np.inf)

    def tree(self, num_nodes: int, depth: int) -> Tree:
        """Returns the best tree of so many draft tokens and at most so many levels."""
        parents, level = [], [(0, num_nodes + 1)]
        for levels in range(depth, 0, -1):
            following = []
            for node, size in level:
                shares = []  # the sizes of the children's trees, the last child's first
                for rank in reversed(range(self._counts[levels][size])):
                    shares.append(self._splits[levels][rank, size])
                    size -= shares[-1]
                for share in reversed(shares):
                    parents.append(node)
                    following.append((len(parents), share))
            level = following
        return Tree(tuple(parents))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tree and what it is worth.

    Attributes:
        tree: the shape.
        tokens_per_call: tokens per target call.
        speedup: speed-up over autoregressive sampling in wall time.
    """

    tree: Tree
    tokens_per_call: float
    speedup: float


def best_plan(
    rates: Sequence[float],
    num_nodes: int,
    draft_cost: Callable[[int], float],
    scoring_cost: Callable[[int], float],
    most_levels: int = 16,
    exactly: bool = False,
) -> Plan | None:
    """Returns the fastest tree of at most `num_nodes` draft tokens (Sequoia, section 3.3).

    For every number of draft tokens and of levels, only the shape with most tokens per call is
    tried. None if there is no tree.

    Args:
        rates: the probability that the b-th child of a node is accepted, if the node is.
        num_nodes: most draft tokens.
        draft_cost: cost of one pass of the draft over so many tokens.
        scoring_cost: cost of one pass of the target over so many tokens.
        most_levels: most levels below the root.
        exactly: whether trees of fewer draft tokens are left out.
    """
    table, found = _Table(rates, num_nodes, most_levels), []
    for nodes in range(num_nodes if exactly else 1, num_nodes + 1):
        for depth in range(1, min(nodes, most_levels) + 1):
            if table.has(nodes, depth):
                tree = table.tree(nodes, depth)
                found.append(planned(tree, rates, draft_cost, scoring_cost))
    return max(found, key=lambda plan: plan.speedup, default=None)


def plans(
    rates: Sequence[float],
    sizes: Sequence[int],
    draft_cost: Callable[[int], float],
    scoring_cost: Callable[[int], float],
    most_levels: int = 16,
) -> dict[str, Plan]:
    """Returns the fastest chain, and the fastest tree of each size, by name."""
    costs = draft_cost, scoring_cost
    longest = min(max(sizes), most_levels)
    chosen = {"chain": best_plan(rates[:1], longest, *costs, most_levels)}
    for size in sorted(set(sizes)):
        plan = best_plan(rates, size, *costs, most_levels, exactly=True)
        if plan is not None:
            chosen[f"tree of {size}"] = plan
    return chosen


def plans_by_rank(
    rates: np.ndarray,
    sizes: Sequence[int],
    draft_cost: Callable[[int], float],
    scoring_cost: Callable[[int], float],
) -> dict[str, Plan]:
    """Returns the fastest tree of chosen tokens of each size, by name; sizes that fit only.

    Args:
        rates: as of `plan_by_rank`.
        sizes: numbers of draft tokens.
        draft_cost: cost of drafting so many levels.
        scoring_cost: cost of one pass of the target over so many tokens.
    """
    chosen = {}
    for size in sorted(set(sizes)):
        found = []
        for levels in range(1, len(rates) + 1):
            try:
                tree = plan_by_rank(rates[:levels], size)
            except InputError:
                continue
            tokens = tokens_by_rank(rates, tree)
            cost = draft_cost(tree.depth) + scoring_cost(size + 1)
            found.append(Plan(tree, tokens, tokens / cost))
        if found:
            chosen[f"tree of {size}"] = max(found, key=lambda plan: plan.speedup)
    return chosen


def planned(tree: Tree, rates, draft_cost, scoring_cost) -> Plan:
    """Returns what a tree is worth; arguments as in `best_plan`.

    A round takes a pass of the draft per level that has children, and one of the target.
    """
    tokens = tokens_per_call(rates, tree)
    drafting = sum(draft_cost(count) for count in tree.fed_levels)
    return Plan(tree, tokens, tokens / (drafting + scoring_cost(tree.num_nodes + 1)))
