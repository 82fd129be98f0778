"""Block verification of the best of several paths.

**Lossless** for paths that were drawn from the draft's distribution independently of each other
(greedy multi-path block verification, arXiv 2602.16961). The best path holds tokens that the target
finds more probable than the draft does. Its distribution is not the draft's any more, but is known:
block verification is given that one. With one path it is block verification.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.types import Array, Proposal
from spsjax.verifiers import base, block, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Chooses a path below each child of the root, the best of them, and judges it. Lossless.

    A path follows first children: other children are not looked at. All paths are cut off where the
    shortest one ends.
    """

    lossless = True
    trees = True

    def check(self, proposal):
        verdicts.check_independent(proposal, "multi-path verification")

    def verify(self, keys_B, proposal, target_probs):
        nodes, chain, target = best_path(proposal, target_probs)
        verdict = block.block(keys_B, chain, target)
        path = jnp.where(verdict.path >= 0, nodes, -1)
        return dataclasses.replace(verdict, path=path)

    def accept_probs(self, proposal, target_probs):
        nodes, chain, target = best_path(proposal, target_probs)
        accept = block.Verifier().accept_probs(chain, target)
        at_node = nodes[:, 1:, None] == 1 + jnp.arange(accept.shape[1])
        return jnp.sum(jnp.where(at_node, accept[..., None], 0), axis=1)


def best_path(proposal: Proposal, target_probs: Array) -> tuple[Array, Proposal, Array]:
    """Returns the best path's nodes [B, M], the path as a chain, and the target along it.

    Paths are compared token by token: after the same tokens, the better one is that of the higher
    ratio of target and draft, or of equal ones the smaller token. `probs` of the chain are the
    distributions of the best path's tokens. Of m paths the best one begins with some tokens with
    probability (1 - A)^m - (1 - A - Q)^m, where Q is what the draft gives these tokens, and A what
    it gives all better beginnings of the same length.
    """
    (B, M, V), N = target_probs.shape, target_probs.shape[1] - 1
    if not N:  # nothing was proposed
        return jnp.zeros((B, 1), jnp.int32), proposal, target_probs
    row, paths = jnp.arange(B), _paths(proposal)
    started, sizes = paths[:, :, 0] > 0, jnp.sum(paths > 0, axis=2)
    count = jnp.sum(started, axis=1)
    length = jnp.min(jnp.where(started, sizes, N), axis=1, initial=N) * (count > 0)
    draft_probs = jnp.pad(proposal.probs, ((0, 0), (0, M - proposal.probs.shape[1]), (0, 0)))

    def extend(carry, depth):
        node, alive, better, own = carry  # of the best path so far
        draft, target = draft_probs[row, node], target_probs[row, node]
        ratio = jnp.where(draft > 0, target / jnp.where(draft > 0, draft, 1), -1)
        order = jnp.argsort(-ratio, axis=1, stable=True)  # the best token first
        rank = jnp.argsort(order, axis=1)
        mass = jnp.take_along_axis(draft, order, axis=1)
        before = jnp.take_along_axis(jnp.cumsum(mass, axis=1) - mass, rank, axis=1)
        # For every token: what better beginnings have, and what this one has.
        betters, owns = better[:, None] + own[:, None] * before, own[:, None] * draft
        here = _share(N, count, better, own)[:, None]
        probs = draft * _share(N, count[:, None], betters, owns) / jnp.where(here == 0, 1, here)
        nodes = paths[:, :, depth]
        drawn = jnp.take_along_axis(proposal.tokens, jnp.maximum(nodes - 1, 0), axis=1)
        place = jnp.take_along_axis(rank, jnp.maximum(drawn, 0), axis=1)
        best = jnp.argmin(jnp.where(alive, place, V), axis=1)
        token, node = drawn[row, best], jnp.maximum(nodes[row, best], 0)
        alive &= drawn == token[:, None]
        token = jnp.maximum(token, 0)
        goes_on = depth < length
        result = jnp.where(goes_on, node, -1), jnp.where(goes_on, token, -1), probs
        return (node, alive, betters[row, token], owns[row, token]), result

    zeros = jnp.zeros(B, target_probs.dtype)
    carry = jnp.zeros(B, jnp.int32), started, zeros, zeros + 1
    _, columns = lax.scan(extend, carry, jnp.arange(N))
    nodes, tokens, probs = (jnp.moveaxis(column, 0, 1) for column in columns)
    nodes = jnp.pad(nodes, ((0, 0), (1, 0)))
    return nodes, Proposal(tokens, probs), tree.along(nodes, target_probs)


def _paths(proposal: Proposal) -> Array:
    """Returns [B, N, N]: the nodes of the path that begins with each draft token, then 0.

    Only tokens below the root begin a path. A path goes on to the first child, and ends where a
    token may not be accepted.
    """
    parents, offered = verdicts.parents_of(proposal), verdicts.offered(proposal)
    B, N = parents.shape
    node = jnp.arange(1, N + 1, dtype=jnp.int32)
    is_child = parents[:, None] == jnp.arange(N + 1)[:, None]  # [B, M, N]
    child = jnp.min(jnp.where(is_child, node, N + 1), axis=2) % (N + 1)
    child = jnp.where(jnp.pad(offered, ((0, 0), (1, 0)))[jnp.arange(B)[:, None], child], child, 0)
    first = jnp.where((parents == 0) & offered, node, 0)

    def descend(nodes, _):
        below = jnp.where(nodes > 0, jnp.take_along_axis(child, nodes, axis=1), 0)
        return below, nodes

    return jnp.moveaxis(lax.scan(descend, first, None, length=N)[1], 0, 2)


def _share(most: int, count: Array, better: Array, own: Array) -> Array:
    """Returns ((1 - A)^m - (1 - A - Q)^m) / Q for m = `count` up to `most`, without cancellation.

    It is the sum of (1 - A)^i (1 - A - Q)^(m - 1 - i) over i < m.
    """
    above = jnp.maximum(1 - better, 0)
    below = jnp.maximum(above - own, 0)

    def add(m, carry):
        total, power = carry
        return jnp.where(m < count, power + below * total, total), power * above

    start = jnp.zeros_like(above), jnp.ones_like(above)
    return lax.fori_loop(0, most, add, start)[0]
