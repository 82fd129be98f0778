"""Greedy multi-path block verification: block verification of the best of several paths.

**Lossless** for paths that were drawn from the draft's distribution independently of each other
(arXiv 2602.16961). The best path prefers tokens with a high ratio of target and draft probability.
So its tokens follow another distribution than the draft's, which is known in closed form, and which
block verification uses as the draft. With one path it is block verification.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.types import Array, Proposal, PyTree, Verdict
from spsjax.verifiers import base, block, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Verifies the best of the paths that begin with the children of the root. Lossless.

    A path follows first children, and other children are ignored. All paths are cut to the length
    of the shortest one.
    """

    lossless = True
    trees = True

    def check(self, proposal: Proposal) -> None:
        verdicts.check_independent(proposal, "multi-path verification")

    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        nodes, chain, target = best_path(proposal, target_probs_BMV)
        verdict = block.block(keys_B, chain, target)
        path = jnp.where(verdict.path >= 0, nodes, -1)
        return dataclasses.replace(verdict, path=path)

    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        nodes, chain, target = best_path(proposal, target_probs_BMV)
        accept = block.Verifier().accept_probs(chain, target)
        at_node = nodes[:, 1:, None] == 1 + jnp.arange(accept.shape[1])
        return jnp.sum(jnp.where(at_node, accept[..., None], 0), axis=1)


def best_path(proposal: Proposal, target_probs_BMV: Array) -> tuple[Array, Proposal, Array]:
    """Returns the nodes [B, M] of the best path, the path as a chain, and the target along it.

    Paths are compared token by token. At the first difference, the path with the higher ratio of
    target and draft is better, and at equal ratios the path with the smaller token. `probs` of the
    chain are the distributions of the best path's tokens. A prefix begins the best of m paths with
    probability (1 - A)^m - (1 - A - Q)^m, where Q is the prefix's probability under the draft, and
    A that of all better prefixes of the same length.
    """
    B, M, V = target_probs_BMV.shape
    N = M - 1
    if not N:  # nothing was proposed
        return jnp.zeros((B, 1), jnp.int32), proposal, target_probs_BMV
    row, paths = jnp.arange(B), _paths(proposal)
    started, sizes = paths[:, :, 0] > 0, jnp.sum(paths > 0, axis=2)
    count_B = jnp.sum(started, axis=1)
    length_B = jnp.min(jnp.where(started, sizes, N), axis=1, initial=N) * (count_B > 0)
    draft_probs = verdicts.probs_of(proposal)

    def extend(carry: PyTree, depth: Array) -> tuple[PyTree, tuple[Array, ...]]:
        # The best path so far: its last node, the paths that share its tokens, and A and Q.
        node, alive, better_B, prefix_B = carry
        draft, target = draft_probs[row, node], target_probs_BMV[row, node]
        ratio = jnp.where(draft > 0, target / jnp.where(draft > 0, draft, 1), -1)
        order = jnp.argsort(-ratio, axis=1, stable=True)  # the best token first
        rank = jnp.argsort(order, axis=1)
        mass = jnp.take_along_axis(draft, order, axis=1)
        before = jnp.take_along_axis(jnp.cumsum(mass, axis=1) - mass, rank, axis=1)
        # A and Q of the prefixes that continue with each token of the vocabulary.
        better_BV = better_B[:, None] + prefix_B[:, None] * before
        prefix_BV = prefix_B[:, None] * draft
        scale = _share(N, count_B, better_B, prefix_B)[:, None]
        share = _share(N, count_B[:, None], better_BV, prefix_BV)
        probs = draft * share / jnp.where(scale == 0, 1, scale)
        nodes = paths[:, :, depth]
        drawn = jnp.take_along_axis(proposal.tokens, jnp.maximum(nodes - 1, 0), axis=1)
        drawn_rank = jnp.take_along_axis(rank, jnp.maximum(drawn, 0), axis=1)
        best = jnp.argmin(jnp.where(alive, drawn_rank, V), axis=1)
        token, node = drawn[row, best], jnp.maximum(nodes[row, best], 0)
        alive &= drawn == token[:, None]
        token = jnp.maximum(token, 0)
        in_path = depth < length_B
        result = jnp.where(in_path, node, -1), jnp.where(in_path, token, -1), probs
        return (node, alive, better_BV[row, token], prefix_BV[row, token]), result

    zeros = jnp.zeros(B, target_probs_BMV.dtype)
    carry = jnp.zeros(B, jnp.int32), started, zeros, zeros + 1
    _, columns = lax.scan(extend, carry, jnp.arange(N))
    nodes, tokens, probs = (jnp.moveaxis(column, 0, 1) for column in columns)
    nodes = jnp.pad(nodes, ((0, 0), (1, 0)))
    return nodes, Proposal(tokens, probs), tree.along(nodes, target_probs_BMV)


def _paths(proposal: Proposal) -> Array:
    """Returns the nodes [B, N, N] of the path that begins with each draft token, then 0.

    Only children of the root begin a path. A path continues with the first child, and ends before a
    token that may not be accepted.
    """
    parents, offered = verdicts.parents_of(proposal), verdicts.offered(proposal)
    B, N = parents.shape
    node = jnp.arange(1, N + 1, dtype=jnp.int32)
    is_child = parents[:, None] == jnp.arange(N + 1)[:, None]  # [B, M, N]
    child = jnp.min(jnp.where(is_child, node, N + 1), axis=2) % (N + 1)
    child = jnp.where(jnp.pad(offered, ((0, 0), (1, 0)))[jnp.arange(B)[:, None], child], child, 0)
    first = jnp.where((parents == 0) & offered, node, 0)

    def descend(nodes: Array, _: None) -> tuple[Array, Array]:
        below = jnp.where(nodes > 0, jnp.take_along_axis(child, nodes, axis=1), 0)
        return below, nodes

    return jnp.moveaxis(lax.scan(descend, first, None, length=N)[1], 0, 2)


def _share(most: int, count: Array, better: Array, prefix: Array) -> Array:
    """Returns ((1 - A)^m - (1 - A - Q)^m) / Q for m = `count` up to `most`, without cancellation.

    It is computed as the sum of (1 - A)^i (1 - A - Q)^(m - 1 - i) over i < m.
    """
    above = jnp.maximum(1 - better, 0)
    below = jnp.maximum(above - prefix, 0)

    def add(m: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, power = carry
        return jnp.where(m < count, power + below * total, total), power * above

    start = jnp.zeros_like(above), jnp.ones_like(above)
    return lax.fori_loop(0, most, add, start)[0]
