"""K-sequential selection on a tree: all children of a node are tried at one lower acceptance.

**Lossless** for children that were drawn from the draft's distribution independently of each other
(Sun et al. 2023, arXiv 2310.15141, Algorithm 1). With one child it is modified rejection sampling.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from spsjax import sampling, tree
from spsjax.types import Array, Proposal
from spsjax.verifiers import base, match, verdicts

_BISECTIONS = 40


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Accepts a child of k with probability min(1, target / (rho draft)). Lossless.

    If all are rejected, what is left of the target is drawn, which may be a child after all. rho is
    the least divisor for which that is a distribution.
    """

    lossless = True
    trees = True

    def check(self, proposal):
        verdicts.check_independent(proposal, "k-sequential selection")

    def verify(self, keys_B, proposal, target_probs):
        (B, M, _), N = target_probs.shape, proposal.tokens.shape[1]
        accept, left = selection(proposal, target_probs)
        accepted = sampling.uniforms(keys_B, sampling.ACCEPT, N) < accept
        uniforms = sampling.uniforms(keys_B, sampling.NEXT, 2 * M).reshape(B, M, 2)
        drawn = sampling.draw(left, uniforms)
        return match.walk(proposal, drawn, jnp.sum(left, axis=-1), accepted)

    def accept_probs(self, proposal, target_probs):
        parents = verdicts.parents_of(proposal)
        accept, left = selection(proposal, target_probs)
        mass = jnp.sum(left, axis=-1, keepdims=True)
        # Where only rounding is left, a compiled sum may be far below what it was taken of.
        left = jnp.minimum(left / jnp.where(mass == 0, 1, mass), 1)
        same = tree.siblings(parents)
        none = jnp.prod(jnp.where(same, 1 - accept[:, None], 1), axis=2)
        drawn = none * match.drawn_probs(proposal, left)
        return verdicts.with_ancestors(parents, verdicts.first_accepted(parents, accept) + drawn)


def selection(proposal: Proposal, target_probs: Array) -> tuple[Array, Array]:
    """Returns the probability to accept each child, and what is left: [B, N], [B, M, V]."""
    parents, M = verdicts.parents_of(proposal), target_probs.shape[1]
    missing = M - proposal.probs.shape[1]
    draft_probs = jnp.pad(proposal.probs, ((0, 0), (0, missing), (0, 0)))
    target_at, draft_at = (
        verdicts.at_tokens(proposal, probs) for probs in (target_probs, draft_probs)
    )
    # A token of draft probability 0 was not drawn: it counts as not proposed.
    alive = verdicts.offered(proposal) & ~(draft_at <= 0)
    mine = (parents[:, None] == jnp.arange(M)[:, None]) & alive[:, None]
    children = jnp.sum(mine, axis=2).astype(target_probs.dtype)  # [B, M]
    rho = divisor(draft_probs, target_probs, children)
    common = jnp.minimum(draft_probs, target_probs / rho[..., None])
    share = jnp.sum(common, axis=-1)
    some = 1 - jnp.maximum(1 - share, 0) ** children  # the probability that some child is accepted
    scale = jnp.where(share == 0, 0, some / jnp.where(share == 0, 1, share))
    left = jnp.maximum(target_probs - common * scale[..., None], 0)
    # Nothing is left where some child is accepted for sure, to rounding.
    left = jnp.where(jnp.sum(left, axis=-1, keepdims=True) == 0, target_probs, left)
    rho_at = jnp.take_along_axis(rho, parents, axis=1)
    accept = jnp.where(alive, target_at / (rho_at * jnp.where(alive, draft_at, 1)), 0)
    return jnp.minimum(accept, 1), left


def divisor(draft_probs: Array, target_probs: Array, children: Array) -> Array:
    """Returns rho for k children each: the root of 1 - (1 - share)**k = rho share in [1, k].

    `share` is the sum of min(draft, target / rho). The root is rounded up: a divisor that is too
    small would be biased. [..., V], [..., V], [...] -> [...].
    """

    def narrow(_, interval):
        low, high = interval
        middle = (low + high) / 2
        share = jnp.sum(jnp.minimum(draft_probs, target_probs / middle[..., None]), axis=-1)
        # Equal to rounding counts as below: both sides are 1 in a whole interval.
        above = 1 - jnp.maximum(1 - share, 0) ** children > middle * share * (1 + slack)
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    slack = 8 * jnp.finfo(target_probs.dtype).eps
    ones = jnp.ones_like(children)
    return lax.fori_loop(0, _BISECTIONS, narrow, (ones, jnp.maximum(children, 1)))[1]
