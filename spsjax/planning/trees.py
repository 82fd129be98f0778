"""Theory of draft trees: expected tokens per call, the best shape, and when trees are faster.

Costs are in passes of the target over one token, as in `theory`. Unless their shape is [K, W],
`rates` are the probabilities that the b-th child of an accepted node is accepted.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spsjax.drafters.shapes import Tree
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.planning.outcome import Table


def tokens_per_call(rates: Sequence[float], tree: Tree) -> float:
    """Returns the tokens per target call of a tree with the same rates at every node."""
    return tokens_by_rank([rates] * tree.depth, tree)


def plan_tree(rates: Sequence[float], num_nodes: int, depth: int) -> Tree:
    """Returns the tree with most tokens per call (Sequoia, Chen et al. 2024, arXiv 2402.12374).

    The dynamic programme of section 3.1 runs over nodes, levels and children. `depth` is the
    maximum number of levels below the root. Raises InputError if rates are not probabilities, or if
    there is no tree of this size and depth.
    """
    table = _Table(rates, num_nodes, depth)
    if not table.has(num_nodes, depth):
        raise InputError(
            f"num_nodes: expected a tree of at most {depth} levels and {len(rates)} children per "
            f"node, found {num_nodes} nodes"
        )
    return table.tree(num_nodes, depth)


def plan_by_rank(rates_KW: np.ndarray, num_nodes: int) -> Tree:
    """Returns the tree of chosen tokens with most tokens per call (Medusa, 2401.10774, 2.3.3).

    The tree grows node by node, by the node with the highest probability of acceptance. `rates` [K,
    W] are acceptance rates per depth and rank, if all earlier tokens are accepted. A rate above
    that of the rank before is replaced by it; the tree is optimal if rates fall with the rank.
    Raises InputError if rates are not probabilities, or if there is no tree of this size.
    """
    check_integer("num_nodes", num_nodes, 1)
    rates_KW = np.asarray(rates_KW, float)
    if rates_KW.ndim != 2 or not rates_KW.size or not np.all((rates_KW >= 0) & (rates_KW <= 1)):
        shown = short_repr(rates_KW.tolist())
        raise InputError(f"rates: expected probabilities by depth and rank, found {shown}")
    # As rates fall, no node is reached more often than its parent or the sibling before it.
    rates_KW = np.minimum.accumulate(rates_KW, axis=1)
    reached, open_paths = {(): 1.0}, {(0,): rates_KW[0, 0]}
    while len(reached) <= num_nodes:
        if not open_paths:
            K, W = rates_KW.shape
            raise InputError(
                f"num_nodes: expected at most {len(reached) - 1}, for {K} levels of {W} children, "
                f"found {num_nodes}"
            )
        path = max(open_paths, key=lambda path: (open_paths[path], -len(path)))
        reached[path] = open_paths.pop(path)
        if path[-1] + 1 < rates_KW.shape[1]:
            depth = len(path) - 1
            rank = path[-1] + 1
            open_paths[*path[:-1], rank] = reached[path[:-1]] * rates_KW[depth, rank]
        if len(path) < rates_KW.shape[0]:
            open_paths[*path, 0] = reached[path] * rates_KW[len(path), 0]
    order = sorted(reached, key=lambda path: (len(path), path))
    return Tree(tuple(order.index(path[:-1]) for path in order[1:]), chosen=True)


def tokens_by_rank(rates_KW: Sequence[Sequence[float]], tree: Tree) -> float:
    """Returns the tokens per target call of a tree, by rates [K, W] per depth and rank."""
    reached = np.ones(tree.num_nodes + 1)
    for depth, level in enumerate(tree.levels[:-1]):
        for node in level:
            for rank, child in enumerate(tree.children[node]):
                reached[child] = reached[node] * rates_KW[depth][rank]
    return float(reached.sum())


class _Table:
    """The best trees of all sizes up to a number of draft tokens and of levels."""

    def __init__(self, rates, num_nodes: int, depth: int):
        check_integer("num_nodes", num_nodes, 1)
        check_integer("depth", depth, 1)
        rates = np.asarray(rates, float)
        if rates.ndim != 1 or not len(rates) or not np.all((rates >= 0) & (rates <= 1)):
            shown = short_repr(rates.tolist())
            raise InputError(f"rates: expected probabilities, one per child, found {shown}")
        sizes = num_nodes + 2
        # tokens[levels][m]: tokens per call of the best tree of m nodes, its root included, with at
        # most `levels` levels below the root. counts: number of its root's children.
        # splits[levels][b][m]: nodes below the root's last child, if it has b + 1 children.
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
        """Returns whether a tree of these draft tokens and at most `depth` levels exists."""
        return bool(self._tokens[depth][num_nodes + 1] > -np.inf)

    def trees(self, num_nodes: int) -> list[Tree]:
        """Returns the best trees of these draft tokens, one per maximum depth."""
        depths = range(1, min(num_nodes + 1, len(self._tokens)))
        return [self.tree(num_nodes, depth) for depth in depths if self.has(num_nodes, depth)]

    def tree(self, num_nodes: int, depth: int) -> Tree:
        """Returns the best tree of these draft tokens and at most `depth` levels."""
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
class TreePlan:
    """A tree and its expected speed."""

    tree: Tree  # the shape
    tokens_per_call: float  # tokens per target call
    speedup: float  # speed-up over autoregressive sampling in wall time


def plans(
    rates: Sequence[float],
    sizes: Sequence[int],
    draft_cost: Callable[[int], float],
    scoring_cost: Callable[[int], float],
    most_levels: int = 16,
) -> dict[str, TreePlan]:
    """Returns the fastest chain, and the fastest tree per size, by name (Sequoia, section 3.3).

    Per number of draft tokens and of levels, only the shape with most tokens per call is tried.
    Costs are functions of the number of tokens of a pass.
    """
    best = _Table(rates, max(sizes), most_levels)
    chains = [Tree.branching(*[1] * K) for K in range(1, min(max(sizes), most_levels) + 1)]
    shapes = {"chain": chains} | {f"tree of {size}": best.trees(size) for size in sorted(sizes)}

    def cost(tree):  # a pass of the draft per level that has children, and one of the target
        drafting = sum(draft_cost(count) for count in tree.fed_levels)
        return drafting + scoring_cost(tree.num_nodes + 1)

    return _fastest(shapes, lambda tree: tokens_per_call(rates, tree), cost)


def plans_by_rank(
    rates_KW: np.ndarray,
    sizes: Sequence[int],
    draft_cost: Callable[[int], float],
    scoring_cost: Callable[[int], float],
) -> dict[str, TreePlan]:
    """Returns the fastest tree of chosen tokens per size that fits, by name.

    `draft_cost` is a function of the number of levels, and `scoring_cost` of the number of tokens.
    """
    most = np.cumsum([rates_KW.shape[1] ** depth for depth in range(1, len(rates_KW) + 1)])
    shapes = {
        f"tree of {size}": [
            plan_by_rank(rates_KW[: levels + 1], size) for levels in np.flatnonzero(most >= size)
        ]
        for size in sorted(sizes)
    }
    return _fastest(
        shapes,
        lambda tree: tokens_by_rank(rates_KW, tree),
        lambda tree: draft_cost(tree.depth) + scoring_cost(tree.num_nodes + 1),
    )


def _fastest(
    shapes: Mapping[str, Sequence[Tree]],
    tokens: Callable[[Tree], float],
    cost: Callable[[Tree], float],
) -> dict[str, TreePlan]:
    """Returns the fastest tree per group by name, without empty groups."""
    chosen = {}
    for name, candidates in shapes.items():
        valued = [TreePlan(tree, tokens(tree), tokens(tree) / cost(tree)) for tree in candidates]
        if valued:
            chosen[name] = max(valued, key=lambda plan: plan.speedup)
    return chosen


def table(plans: Mapping[str, TreePlan], target_ms: float) -> Table:
    """Returns a table of trees by name; `target_ms` is the time of a pass of the target."""
    header = "shape", "draft tokens", "levels", "tokens per call", "ms per round", "speed-up"
    rows = []
    for name, plan in plans.items():
        round_ms = target_ms * plan.tokens_per_call / plan.speedup
        figures = plan.tokens_per_call, round_ms, plan.speedup
        counts = plan.tree.num_nodes, plan.tree.depth
        rows.append((name, *counts, *(f"{figure:.2f}" for figure in figures)))
    return Table("", header, rows)


def check_sizes(num_nodes: Sequence[int], most: int | None = None) -> None:
    """Raises InputError unless there are numbers of draft tokens, from 1 to `most`."""
    if not num_nodes:
        raise InputError("num_nodes: expected at least one, found none")
    for size in num_nodes:
        check_integer("num_nodes", size, 1, most)
