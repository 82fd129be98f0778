"""Growth of chains and trees of draft tokens, level by level, from a drafter's distributions.

A drafter gives `feed`, which runs it over the nodes of one level and returns what follows each of
them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax import sampling
from spsjax.drafters.shapes import DynamicTree, Shape, Tree, num_fed
from spsjax.sampling import RowParams
from spsjax.types import Array, Independent, Proposal, PyTree, Round


@dataclasses.dataclass(frozen=True)
class Level:
    """Nodes of one depth that are fed to a drafter together.

    Fed nodes are counted in the order in which they are fed; there are F.

    Attributes:
        tokens: [B, T] int32.
        depth: levels below the root; traced in a chain, but for the root.
        start: fed nodes of the levels above.
        parents: [B, T] int32, the fed node above each; 0 for the root.
        above: [B or 1, T, F] bool, the fed nodes that each sees, itself included.
    """

    tokens: Array
    depth: int | Array
    start: int | Array
    parents: Array
    above: Array

    @property
    def is_root(self) -> bool:
        return isinstance(self.depth, int) and self.depth == 0


# Runs a drafter over a level. Takes its state, and returns the logits [B, T, V] of what follows
# each node, the hidden states [B, T, D] that they were made of (None if it does not tell), and the
# new state.
Feed = Callable[[PyTree, Level], tuple[Array, Array | None, PyTree]]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The newest token of each row's chain, and what the draft made of its place.

    Attributes:
        logits: [B, V], before temperature and filters.
        hidden: [B, D], of which the logits were made; None: the drafter does not tell.
        tokens: [B] int32. They stay in the chain.
        depth: [] int32, 0 for the first token of a chain.
    """

    logits: Array
    hidden: Array | None
    tokens: Array
    depth: int | Array


@dataclasses.dataclass(frozen=True)
class Stops:
    """When a chain ends early.

    Attributes:
        start: state before the first token.
        ends: takes the state and a `Drawn`; returns [B] bool, whether a row's chain ends with its
            token, and the new state.
        log: takes a `Drawn`, and returns what a log keeps of it, arrays [B, ...].
        logged: called when traced with the logs of all tokens, [B, K, ...].
    """

    start: PyTree
    ends: Callable[[PyTree, Drawn], tuple[Array, PyTree]]
    log: Callable[[Drawn], PyTree] = lambda drawn: None
    logged: Callable[[PyTree], None] = lambda logs: None


def grow(
    shape: Shape,
    num_speculative_tokens: int,
    feed: Feed,
    state: PyTree,
    now: Round,
) -> tuple[Proposal, Array, PyTree]:
    """Returns a proposal of a shape.

    Only chains heed `now.depths` and `now.stops`; trees are grown whole.

    Args:
        shape: the shape.
        num_speculative_tokens: K, the length of a chain.
        feed: see `Feed`.
        state: first state of `feed`.
        now: the round.

    Returns:
        The proposal, [B, N + 1] int32 which of the fed nodes each node is (0 if it was not fed),
        and the last state of `feed`.
    """
    if isinstance(shape, DynamicTree):
        return _choose_tree(shape, feed, state, now.root)
    N = shape.num_nodes if shape else num_speculative_tokens
    uniforms = sampling.uniforms(now.keys, sampling.DRAFT, 2 * N).reshape(-1, N, 2)
    draw = functools.partial(draw_tree, shape)
    if shape is None:
        may_end = now.stops is not None or now.depths is not None
        draw = functools.partial(_draw_chain, now.stops, now.wanted(N) if may_end else None)
    return draw(feed, state, now.root, now.rows, uniforms)


def _draw_chain(
    stops: Stops | None,
    depths_B: Array | None,
    feed: Feed,
    state: PyTree,
    root_B: Array,
    rows: RowParams,
    uniforms_BK2: Array,
) -> tuple[Proposal, Array, PyTree]:
    """Returns a chain of K tokens, each sampled after the one before, and what `grow` returns.

    A row whose chain has ended proposes nothing more. When all have ended, no step is run.
    `depths_B` are the most tokens of each row; None: K, and no chain ends early.
    """
    B, K = uniforms_BK2.shape[:2]
    node = jnp.arange(K)[None, None]
    may_end = depths_B is not None

    def draft(carry, inputs):
        (last, state, unended, stopping), (k, uniforms_B2) = carry, inputs
        parents = jnp.broadcast_to(jnp.maximum(k - 1, 0), (B, 1))
        logits, hidden, state = feed(state, Level(last[:, None], k, k, parents, node <= k))
        probs, note = sampling.to_probs(logits[:, 0], rows), None
        token = sampling.draw(probs, uniforms_B2)
        proposed = jnp.where(unended, token, -1) if may_end else token
        if may_end:
            unended &= k + 1 < depths_B
        if stops is not None:
            drawn = Drawn(logits[:, 0], None if hidden is None else hidden[:, 0], token, k)
            ends, stopping = stops.ends(stopping, drawn)
            unended, note = unended & ~ends, stops.log(drawn)
        return (token, state, unended, stopping), (proposed, probs, note)

    def draft_if_any(carry, inputs):
        if not may_end:
            return draft(carry, inputs)

        def nothing(carry, inputs):
            token, *others = first
            return carry, (jnp.full_like(token, -1), *jax.tree.map(jnp.zeros_like, others))

        return lax.cond(jnp.any(carry[2]), draft, nothing, carry, inputs)

    uniforms = jnp.moveaxis(uniforms_BK2, 1, 0)
    unended = depths_B > 0 if may_end else jnp.ones(B, bool)
    carry = root_B, state, unended, () if stops is None else stops.start
    carry, first = draft(carry, (0, uniforms[0]))
    drafted = jax.tree.map(lambda one: one[None], first)
    if K > 1:  # for one token the drafter need not be able to take a second step
        later = jnp.arange(1, K, dtype=jnp.int32), uniforms[1:]
        carry, rest = lax.scan(draft_if_any, carry, later)
        drafted = jax.tree.map(lambda *both: jnp.concatenate(both), drafted, rest)
    tokens, probs, logs = jax.tree.map(lambda steps: jnp.moveaxis(steps, 0, 1), drafted)
    if stops is not None:
        stops.logged(logs)
    # The last token of a chain is not fed, but counts as if: nothing ever looks at its row.
    fed_as = jnp.broadcast_to(jnp.arange(K + 1, dtype=jnp.int32), (B, K + 1))
    return Proposal(tokens, probs), fed_as, carry[1]


def draw_tree(
    tree: Tree, feed: Feed, state: PyTree, root_B: Array, rows: RowParams, uniforms_BN2: Array
) -> tuple[Proposal, Array, PyTree]:
    """Returns a proposal of a fixed tree's shape, and what `grow` returns.

    `uniforms_BN2` are two random numbers per draft token.
    """
    tokens, probs = {0: root_B}, {}
    for depth, level in enumerate(tree.levels):
        inner = [node for node in level if tree.children[node]]
        if not inner:
            break
        fed = jnp.stack([tokens[node] for node in inner], axis=1)
        above = jnp.asarray([[tree.above(node) for node in inner]])
        parents = [tree.inner.index(tree.parents[node - 1]) if node else 0 for node in inner]
        parents = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), fed.shape)
        start = tree.inner.index(inner[0])
        logits, _, state = feed(state, Level(fed, depth, start, parents, above))
        if tree.chosen:
            tokens |= _choose_children(tree, inner, logits)
            continue
        whole = sampling.to_probs(logits, _spread_greedy(rows))
        probs |= {node: whole[:, i] for i, node in enumerate(inner)}
        tokens |= _draw_children(tree, inner, whole, rows, uniforms_BN2)
    B, N = uniforms_BN2.shape[:2]
    all_probs = None
    if not tree.chosen:
        nothing = jnp.zeros_like(probs[0])
        all_probs = jnp.stack([probs.get(node, nothing) for node in range(N + 1)], axis=1)
    kind = Independent if tree.replacement else Proposal
    proposal = kind(
        tokens=jnp.stack([tokens[node] for node in range(1, N + 1)], axis=1),
        probs=all_probs,
        parents=jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), (B, N)),
    )
    fed_as = [tree.inner.index(node) if node in tree.inner else 0 for node in range(N + 1)]
    return proposal, jnp.broadcast_to(jnp.asarray(fed_as, jnp.int32), (B, N + 1)), state


def _spread_greedy(rows: RowParams) -> RowParams:
    """Returns the parameters by which trees are drafted: greedy rows get the whole softmax.

    A greedy distribution has one token, but a node may have several children. Any draft is lossless
    in greedy rows, because only the target's own choice is accepted there.
    """
    greedy = rows.temperature == 0
    return RowParams(
        temperature=jnp.where(greedy, 1, rows.temperature),
        top_k=jnp.where(greedy, 0, rows.top_k),
        top_p=jnp.where(greedy, 1, rows.top_p),
        min_p=jnp.where(greedy, 0, rows.min_p),
    )


def _draw_children(tree, inner, probs_BTV, rows, uniforms_BN2) -> dict[int, Array]:
    """Draws the children of some nodes, one after another: node -> [B] tokens."""
    greedy = rows.temperature[:, None] == 0
    vocab = jnp.arange(probs_BTV.shape[2])
    tokens, left = {}, probs_BTV
    for rank in range(max(len(tree.children[node]) for node in inner)):
        index = [i for i, node in enumerate(inner) if len(tree.children[node]) > rank]
        children = [tree.children[inner[i]][rank] for i in index]
        index = np.asarray(index)
        now = left[:, index]
        drawn = sampling.draw(now, uniforms_BN2[:, np.asarray(children) - 1])
        drawn = jnp.where(greedy, jnp.argmax(now, axis=-1).astype(jnp.int32), drawn)
        drawn = jnp.where(jnp.max(now, axis=-1) == 0, -1, drawn)  # nothing is left to draw
        tokens |= {child: drawn[:, i] for i, child in enumerate(children)}
        taken = vocab == drawn[..., None]
        if tree.replacement:
            taken &= greedy[..., None]
        left = left.at[:, index].set(jnp.where(taken, 0, now))
    return tokens


def _choose_children(tree, inner, logits_BTV) -> dict[int, Array]:
    """Returns the most probable tokens after some nodes: child -> [B] tokens."""
    most = max(len(tree.children[node]) for node in inner)
    best = lax.top_k(logits_BTV, most)[1]
    return {
        child: best[:, i, rank]
        for i, node in enumerate(inner)
        for rank, child in enumerate(tree.children[node])
    }


def _choose_tree(
    tree: DynamicTree, feed: Feed, state: PyTree, root_B: Array
) -> tuple[Proposal, Array, PyTree]:
    """Returns a proposal of a dynamic tree, and what `grow` returns."""
    (B,), k, F = root_B.shape, tree.width, num_fed(tree, tree.depth)
    above = jnp.broadcast_to(jnp.arange(F) == 0, (B, 1, F))
    nothing = jnp.zeros((B, 1), jnp.int32)
    logits, _, state = feed(state, Level(root_B[:, None], 0, 0, nothing, above))
    scores, tokens = lax.top_k(jax.nn.log_softmax(logits[:, 0]), k)
    # The pool holds all nodes of all levels. A node's parent is 0 for the root, else 1 + its index.
    pool = [(scores, tokens, jnp.zeros((B, k), jnp.int32))]
    chosen = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))  # among the last level's
    parents_above, offset, fed = above, 0, []
    for depth in range(1, tree.depth):
        scores, tokens = (jnp.take_along_axis(array, chosen, axis=1) for array in pool[-1][:2])
        fed.append(offset + chosen)
        start = 1 + (depth - 1) * k
        own = jnp.arange(F) == (start + jnp.arange(k))[:, None]
        parent = chosen // k if depth > 1 else jnp.zeros_like(chosen)
        above = jnp.take_along_axis(parents_above, parent[..., None], axis=1) | own
        fed_parents = start - k + parent if depth > 1 else parent
        logits, _, state = feed(state, Level(tokens, depth, start, fed_parents, above))
        more, tokens = lax.top_k(jax.nn.log_softmax(logits), k)  # [B, k, k]
        scores = (scores[..., None] + more).reshape(B, k * k)
        parents = jnp.repeat(1 + fed[-1], k, axis=1)
        offset += pool[-1][0].shape[1]
        pool.append((scores, tokens.reshape(B, k * k), parents))
        chosen, parents_above = lax.top_k(scores, k)[1], above
    scores, tokens, parents = (jnp.concatenate(arrays, axis=1) for arrays in zip(*pool))
    # A node is at most as probable as its parent, which comes first among equals: it is kept, too.
    kept = jnp.sort(lax.top_k(scores, tree.num_nodes)[1], axis=1)
    tokens, parents = (jnp.take_along_axis(array, kept, axis=1) for array in (tokens, parents))
    parents = jnp.sum(1 + kept[:, None] <= parents[..., None], axis=2, dtype=jnp.int32)
    numbers = jnp.arange(1, F, dtype=jnp.int32)
    fed = jnp.concatenate([jnp.zeros((B, 0), jnp.int32), *fed], axis=1)
    fed_as = jnp.sum(jnp.where(kept[..., None] == fed[:, None], numbers, 0), axis=2)
    return Proposal(tokens, None, parents), jnp.pad(fed_as, ((0, 0), (1, 0))), state
