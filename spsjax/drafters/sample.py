"""Sampling of chains and trees of draft tokens, level by level.

A drafter passes a function `feed`, which runs it over the nodes of one level and returns the logits
of the token after each node. They may be those of some tokens only (`choices`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax import sampling
from spsjax.drafters.choices import Choices
from spsjax.drafters.shapes import DynamicTree, Shape, Tree, num_fed
from spsjax.sampling import RowParams
from spsjax.types import Array, Independent, Proposal, PyTree, Round


@dataclasses.dataclass(frozen=True)
class Level:
    """Nodes of one depth that are fed to a drafter together.

    The F nodes that are fed in a round are numbered in the order of feeding. These numbers differ
    from node numbers, because leaves are not fed.

    Attributes:
        tokens: tokens of the nodes [B, T] int32.
        depth: depth of the nodes; traced in a chain, except at the root.
        start: number of fed nodes in the levels above.
        parents: fed number of each node's parent [B, T] int32; 0 for the root.
        above: fed nodes to which each node attends [B or 1, T, F] bool, itself included.
    """

    tokens: Array
    depth: int | Array
    start: int | Array
    parents: Array
    above: Array

    @property
    def is_root(self) -> bool:
        return isinstance(self.depth, int) and self.depth == 0


# Function that runs a drafter over a level. It takes the drafter's state. It returns the logits
# [B, T, V] of the token after each node, or its `Choices`; the hidden states [B, T, D] behind them
# (None: the drafter has none); and the new state.
Feed = Callable[[PyTree, Level], tuple[Array | Choices, Array | None, PyTree]]


def feed_by_depth(logits_BKR: Array | Choices) -> Feed:
    """Returns a `Feed` of logits that depend on the depth of a level only, not on its tokens."""
    choices = Choices.of(logits_BKR)

    def feed(state: PyTree, level: Level) -> tuple[Choices, Array | None, PyTree]:
        return choices.at(level.depth).broadcast(level.tokens.shape[1]), None, state

    return feed


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Newest token of each row's chain, with the drafter's outputs from which it was drawn.

    Attributes:
        logits: logits [B, R] of the drafter's choices, before temperature and filters.
        hidden: hidden states [B, D] behind the logits; None: the drafter has none.
        index: index of each drawn token among them [B] int32. The token stays in the chain.
        depth: index in the chain [] int32, 0 for the first token.
    """

    logits: Array
    hidden: Array | None
    index: Array
    depth: int | Array


@dataclasses.dataclass(frozen=True)
class Stops:
    """Rule that ends chains early, and a log of what the rule reads.

    Attributes:
        start: state of the rule before the first token.
        ends: function of the state and a `Drawn`. It returns whether each row's chain ends with its
            token, [B] bool, and the new state.
        log: function of a `Drawn` that returns arrays [B, ...] to log.
        logged: function that receives the logs of all tokens [B, K, ...] when it is traced.
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
    """Samples a proposal from the drafter's distributions.

    Only chains use `now.depths` and `now.stops`; trees always have all their nodes.

    Args:
        shape: shape of the proposal.
        num_speculative_tokens: K, the length of a chain.
        feed: function that runs the drafter (`Feed`).
        state: initial state of `feed`.
        now: the round.

    Returns:
        The proposal; the fed number of each node [B, N + 1] int32, 0 if it was not fed; and the
        final state of `feed`.
    """
    if isinstance(shape, DynamicTree):
        return _choose_tree(shape, feed, state, now.root)
    N = shape.num_nodes if shape else num_speculative_tokens
    uniforms = sampling.uniforms(now.keys, sampling.DRAFT, 2 * N).reshape(-1, N, 2)
    if shape is not None:
        return draw_tree(shape, feed, state, now.root, now.rows, uniforms)
    may_end = now.stops is not None or now.depths is not None
    depths = now.wanted(N) if may_end else None
    return _draw_chain(now, depths, feed, state, uniforms)


def certainty(logits: Array) -> Array:
    """Returns the greatest probability of each distribution [..., V], before temperature.

    It is the estimate of acceptance for drafters that have no better one (`Proposal.confidence`):
    it does not depend on the token that is drawn.
    """
    logits = logits.astype(jnp.float32)
    return jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))


def _draw_chain(
    now: Round, depths_B: Array | None, feed: Feed, state: PyTree, uniforms_BK2: Array
) -> tuple[Proposal, Array, PyTree]:
    """Samples a chain of K tokens one by one; the results are those of `grow`.

    After the end of a row's chain its tokens are -1. When all chains have ended, no step runs.
    `depths_B` are the most tokens per row; None: K, and no chain ends early.
    """
    B, K = uniforms_BK2.shape[:2]
    node, stops = jnp.arange(K)[None, None], now.stops

    def draft(carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        (last, state, running, rule_state), (k, uniforms_B2) = carry, inputs
        parents = jnp.broadcast_to(jnp.maximum(k - 1, 0), (B, 1))
        fed, hidden, state = feed(state, Level(last[:, None], k, k, parents, node <= k))
        choices, log = Choices.of(fed), None
        probs = sampling.to_probs(choices.logits, now.rows)
        index = sampling.draw(probs, uniforms_B2[:, None])
        token = choices.tokens(index[..., None])[:, 0, 0]
        proposed = token if depths_B is None else jnp.where(running, token, -1)
        if depths_B is not None:
            running &= k + 1 < depths_B
        if stops is not None:
            # The rule sees the token that it may end the chain after. That token stays, so the
            # rule cannot bias what is proposed (drafters/stopping.py).
            hidden_BD = None if hidden is None else hidden[:, 0]
            drawn = Drawn(choices.logits[:, 0], hidden_BD, index[:, 0], k)
            ends, rule_state = stops.ends(rule_state, drawn)
            running, log = running & ~ends, stops.log(drawn)
        confidence = certainty(choices.logits[:, 0]) if now.estimates else None
        probs = choices.spread_probs(probs)[:, 0]
        return (token, state, running, rule_state), (proposed, probs, confidence, log)

    def draft_if_any(carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        if depths_B is None:
            return draft(carry, inputs)

        def skip(carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
            token, *others = first
            return carry, (jnp.full_like(token, -1), *jax.tree.map(jnp.zeros_like, others))

        return lax.cond(jnp.any(carry[2]), draft, skip, carry, inputs)

    uniforms = jnp.moveaxis(uniforms_BK2, 1, 0)
    running = jnp.ones(B, bool) if depths_B is None else depths_B > 0
    carry = now.root, state, running, () if stops is None else stops.start
    # The first step is not in the scan, because `feed` may treat the root in another way.
    carry, first = draft(carry, (0, uniforms[0]))
    drafted = jax.tree.map(lambda leaf: leaf[None], first)
    if K > 1:  # a drafter with one step cannot trace a second one
        later = jnp.arange(1, K, dtype=jnp.int32), uniforms[1:]
        carry, others = lax.scan(draft_if_any, carry, later)
        drafted = jax.tree.map(lambda *both: jnp.concatenate(both), drafted, others)
    tokens, probs, confidence, logs = jax.tree.map(lambda steps: jnp.moveaxis(steps, 0, 1), drafted)
    if stops is not None:
        stops.logged(logs)
    # The last token of a chain is not fed to the drafter. Its number is K, a row that is not read.
    fed_numbers = jnp.broadcast_to(jnp.arange(K + 1, dtype=jnp.int32), (B, K + 1))
    return Proposal(tokens, probs, confidence=confidence), fed_numbers, carry[1]


def draw_tree(
    tree: Tree, feed: Feed, state: PyTree, root_B: Array, rows: RowParams, uniforms_BN2: Array
) -> tuple[Proposal, Array, PyTree]:
    """Samples a tree of a fixed shape; the results are those of `grow`.

    `uniforms_BN2` are two random numbers per draft token.
    """
    tokens, probs = {0: root_B}, dict[int, Array]()
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
        choices = Choices.of(logits)
        if tree.chosen:
            tokens |= _choose_children(tree, inner, choices)
            continue
        probs_BTR = sampling.to_probs(choices.logits, _spread_greedy(rows))
        probs_BTV = choices.spread_probs(probs_BTR)
        probs |= {node: probs_BTV[:, i] for i, node in enumerate(inner)}
        tokens |= _draw_children(tree, inner, choices, probs_BTR, rows, uniforms_BN2)
    B, N = uniforms_BN2.shape[:2]
    all_probs = None
    if not tree.chosen:
        zeros = jnp.zeros_like(probs[0])  # for leaves
        all_probs = jnp.stack([probs.get(node, zeros) for node in range(N + 1)], axis=1)
    kind = Independent if tree.replacement else Proposal
    proposal = kind(
        tokens=jnp.stack([tokens[node] for node in range(1, N + 1)], axis=1),
        probs=all_probs,
        parents=jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), (B, N)),
    )
    fed_numbers = [tree.inner.index(node) if node in tree.inner else 0 for node in range(N + 1)]
    return proposal, jnp.broadcast_to(jnp.asarray(fed_numbers, jnp.int32), (B, N + 1)), state


def _spread_greedy(rows: RowParams) -> RowParams:
    """Returns the sampling parameters of tree drafts: greedy rows get the full softmax.

    A greedy distribution has one token, but a node may have several children. Any draft is lossless
    in greedy rows, because verifiers accept only the target's most probable token there.
    """
    greedy = rows.temperature == 0
    return RowParams(
        temperature=jnp.where(greedy, 1, rows.temperature),
        top_k=jnp.where(greedy, 0, rows.top_k),
        top_p=jnp.where(greedy, 1, rows.top_p),
        min_p=jnp.where(greedy, 0, rows.min_p),
    )


def _draw_children(
    tree: Tree,
    inner: list[int],
    choices: Choices,
    probs_BTR: Array,
    rows: RowParams,
    uniforms_BN2: Array,
) -> dict[int, Array]:
    """Draws the children of nodes, first children first: node -> [B] tokens."""
    greedy = rows.temperature[:, None] == 0
    indices = jnp.arange(probs_BTR.shape[2])
    tokens, weights = dict[int, Array](), probs_BTR
    for rank in range(max(len(tree.children[node]) for node in inner)):
        index = [i for i, node in enumerate(inner) if len(tree.children[node]) > rank]
        children = [tree.children[inner[i]][rank] for i in index]
        index = np.asarray(index)
        now = weights[:, index]
        drawn = sampling.draw(now, uniforms_BN2[:, np.asarray(children) - 1])
        drawn = jnp.where(greedy, jnp.argmax(now, axis=-1).astype(jnp.int32), drawn)
        drawn = jnp.where(jnp.max(now, axis=-1) == 0, -1, drawn)  # all tokens were drawn before
        new = choices.after(index).tokens(drawn[..., None])
        tokens |= {child: new[:, i, 0] for i, child in enumerate(children)}
        # Without replacement a drawn token has weight 0 for later siblings. `draw` normalises.
        taken = indices == drawn[..., None]
        if tree.replacement:
            taken &= greedy[..., None]
        weights = weights.at[:, index].set(jnp.where(taken, 0, now))
    return tokens


def _choose_children(tree: Tree, inner: list[int], choices: Choices) -> dict[int, Array]:
    """Returns the most probable tokens after nodes: child -> [B] tokens."""
    most = max(len(tree.children[node]) for node in inner)
    best = choices.best(most)[1]
    return {
        child: best[:, i, rank]
        for i, node in enumerate(inner)
        for rank, child in enumerate(tree.children[node])
    }


def _choose_tree(
    tree: DynamicTree, feed: Feed, state: PyTree, root_B: Array
) -> tuple[Proposal, Array, PyTree]:
    """Chooses the tokens of a dynamic tree (EAGLE-2, 4.1); the results are those of `grow`."""
    (B,), k, F = root_B.shape, tree.width, num_fed(tree, tree.depth)
    above = jnp.broadcast_to(jnp.arange(F) == 0, (B, 1, F))
    no_parents = jnp.zeros((B, 1), jnp.int32)
    logits, _, state = feed(state, Level(root_B[:, None], 0, 0, no_parents, above))
    # A node's score is the log probability of its path.
    scores, tokens = (array[:, 0] for array in Choices.of(logits).best(k))
    # Candidates of all levels. A parent is 0 for the root, else 1 + the candidate's index.
    pool = [(scores, tokens, jnp.zeros((B, k), jnp.int32))]
    chosen = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))  # index in the last level
    parents_above, offset, fed = above, 0, []
    for depth in range(1, tree.depth):
        # Expansion: the k best candidates of the last level are fed, and get k children each.
        scores, tokens = (jnp.take_along_axis(array, chosen, axis=1) for array in pool[-1][:2])
        fed.append(offset + chosen)
        start = 1 + (depth - 1) * k
        itself = jnp.arange(F) == (start + jnp.arange(k))[:, None]
        parent = chosen // k if depth > 1 else jnp.zeros_like(chosen)
        above = jnp.take_along_axis(parents_above, parent[..., None], axis=1) | itself
        fed_parents = start - k + parent if depth > 1 else parent
        logits, _, state = feed(state, Level(tokens, depth, start, fed_parents, above))
        more, tokens = Choices.of(logits).best(k)  # [B, k, k]
        scores = (scores[..., None] + more).reshape(B, k * k)
        parents = jnp.repeat(1 + fed[-1], k, axis=1)
        offset += pool[-1][0].shape[1]
        pool.append((scores, tokens.reshape(B, k * k), parents))
        chosen, parents_above = lax.top_k(scores, k)[1], above
    scores, tokens, parents = (jnp.concatenate(arrays, axis=1) for arrays in zip(*pool))
    # Reranking: the N best candidates are proposed. The parent of a proposed node is always among
    # them: its score is at least as high, and `top_k` takes the first of equals.
    best = jnp.sort(lax.top_k(scores, tree.num_nodes)[1], axis=1)
    tokens, parents = (jnp.take_along_axis(array, best, axis=1) for array in (tokens, parents))
    # From indices of candidates to node numbers: counts the proposed candidates up to the parent.
    parents = jnp.sum(1 + best[:, None] <= parents[..., None], axis=2, dtype=jnp.int32)
    numbers = jnp.arange(1, F, dtype=jnp.int32)
    fed = jnp.concatenate([jnp.zeros((B, 0), jnp.int32), *fed], axis=1)
    fed_numbers = jnp.sum(jnp.where(best[..., None] == fed[:, None], numbers, 0), axis=2)
    return Proposal(tokens, None, parents), jnp.pad(fed_numbers, ((0, 0), (1, 0))), state
