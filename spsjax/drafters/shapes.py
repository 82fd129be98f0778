"""Shapes of drafts: chains, trees of a fixed shape, and dynamic trees."""

import dataclasses
import functools

from spsjax.errors import InputError, check_integer, short_repr
from spsjax.utils.fields import Checked, flag, integer


@dataclasses.dataclass(frozen=True)
class Tree(Checked):
    """Tree of a fixed shape. Lossless.

    Tokens are drawn from the draft's distributions. In greedy rows the children of a node are its
    most probable tokens, in order of probability.

    Attributes:
        parents: parent of each draft token. Node 0 is the last committed token, and node 1 + n is
            draft token n. Nodes are ordered by depth.
        replacement: whether the children of a node are drawn independently of each other, so that
            some may be equal; else without replacement.
        chosen: whether the children of a node are its most probable tokens in all rows. These are
            not drawn, and count as point masses.
    """

    parents: tuple[int, ...]
    replacement: bool = flag(False)
    chosen: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replacement and self.chosen:
            raise InputError("replacement: cannot be True if chosen is True. Set one to False")
        parents = self.parents
        integers = isinstance(parents, tuple) and all(type(parent) is int for parent in parents)
        if not integers or not parents or parents[0] != 0:
            raise InputError(
                f"parents: expected a tuple of integers that begins with 0, "
                f"found {short_repr(parents)}"
            )
        depths = [0]
        for node, parent in enumerate(parents, start=1):
            if not 0 <= parent < node or depths[parent] + 1 < depths[-1]:
                raise InputError(
                    f"parents: expected nodes level by level, each after its parent, "
                    f"found parent {parent} of node {node}"
                )
            depths.append(depths[parent] + 1)

    @classmethod
    def branching(cls, *counts: int, replacement: bool = False) -> "Tree":
        """Returns the tree in which every node at depth d has `counts[d]` children.

        `Tree.branching(2, 2)` has six nodes. Raises InputError for a count below 1.
        """
        parents: list[int] = []
        level = [0]
        for count in counts:
            check_integer("counts", count, 1)
            start = len(parents) + 1
            parents += [node for node in level for _ in range(count)]
            level = list(range(start, len(parents) + 1))
        return cls(tuple(parents), replacement)

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return len(self.levels) - 1

    @functools.cached_property
    def levels(self) -> list[list[int]]:
        """Nodes of each depth, from the root on."""
        depths, levels = [0], [[0]]
        for node, parent in enumerate(self.parents, start=1):
            depths.append(depths[parent] + 1)
            if depths[node] == len(levels):
                levels.append([])
            levels[depths[node]].append(node)
        return levels

    @functools.cached_property
    def children(self) -> list[list[int]]:
        """Children of each node."""
        children: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parents, start=1):
            children[parent].append(node)
        return children

    @property
    def width(self) -> int:
        """Greatest number of children of a node."""
        return max(map(len, self.children))

    @functools.cached_property
    def inner(self) -> list[int]:
        """Nodes with children, in the order in which they are fed to the draft."""
        return [node for node, children in enumerate(self.children) if children]

    @functools.cached_property
    def fed_levels(self) -> list[int]:
        """Number of fed nodes per level."""
        counts = [sum(bool(self.children[node]) for node in level) for level in self.levels]
        return [count for count in counts if count]

    def above(self, node: int) -> list[bool]:
        """Returns whether a node attends to each fed node: its ancestors and itself."""
        path = {node}
        while node:
            node = self.parents[node - 1]
            path.add(node)
        return [fed in path for fed in self.inner]


@dataclasses.dataclass(frozen=True)
class DynamicTree(Checked):
    """Tree that grows where the draft is most confident (EAGLE-2, arXiv 2406.16858, 4.1). Lossless.

    At each level, the `width` nodes with the most probable paths get their most probable tokens as
    children. The proposal has the `num_nodes` nodes with the most probable paths of all levels.
    Tokens are chosen, not drawn, so they count as point masses.

    Attributes:
        num_nodes: N, number of draft tokens per proposal.
        depth: K, number of levels below the root.
        width: number of nodes per level that get children, and of children per node.
    """

    num_nodes: int = integer(16, 1)
    depth: int = integer(4, 1)
    width: int = integer(4, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.width + (self.depth - 1) * self.width**2
        if self.num_nodes > most:
            raise InputError(
                f"num_nodes: expected at most {most} for depth {self.depth} and width "
                f"{self.width}, found {self.num_nodes}"
            )

    @property
    def fed_levels(self) -> list[int]:
        """Number of fed nodes per level."""
        return [1] + [self.width] * (self.depth - 1)


Shape = Tree | DynamicTree | None  # None: a chain


def checked_depth(shape: Shape, num_speculative_tokens: int | None, vocab_size: int) -> int:
    """Returns K: the depth of the tree, or of a chain `num_speculative_tokens`, 4 for None.

    Raises InputError if `num_speculative_tokens` is not the depth of the tree, or if the tree is
    wider than the vocabulary.
    """
    chosen = isinstance(shape, DynamicTree) or (shape is not None and shape.chosen)
    if shape is not None and chosen and shape.width > vocab_size:
        raise InputError(
            f"tree: expected at most {vocab_size} children of a node, one for each token, "
            f"found {shape.width}"
        )
    if shape is None:
        return 4 if num_speculative_tokens is None else num_speculative_tokens
    if num_speculative_tokens not in (None, shape.depth):
        raise InputError(
            f"num_speculative_tokens: expected the depth of the tree, {shape.depth}, "
            f"found {num_speculative_tokens}"
        )
    return shape.depth


def fed_levels(shape: Shape, num_speculative_tokens: int) -> list[int]:
    """Returns the number of fed nodes per level, from the root's level on."""
    return shape.fed_levels if shape else [1] * num_speculative_tokens


def num_fed(shape: Shape, num_speculative_tokens: int) -> int:
    """Returns the number of nodes that are fed to the draft, the root included."""
    return sum(fed_levels(shape, num_speculative_tokens))


def score_sizes(shape: Shape, num_speculative_tokens: int) -> tuple[int]:
    """Returns the only size of scoring passes that a shape needs: all its draft tokens."""
    return (shape.num_nodes if shape else num_speculative_tokens,)
