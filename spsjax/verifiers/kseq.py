"""K-sequential selection: rejection sampling of each child of a node with a common divisor.

**Lossless** for children that were drawn from the draft's distribution independently of each other
(SpecTr; Sun et al. 2023, arXiv 2310.15141, Algorithm 1). With one child it is modified rejection
sampling.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from spsjax import sampling, tree
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import base, match, verdicts

_BISECTIONS = 40


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Accepts each of k children with probability min(1, target / (rho draft)). Lossless.

    If all children are rejected, a token is drawn from the residual. If it equals a child, the walk
    continues there. rho is the least divisor for which the residual is a distribution.
    """

    lossless = True
    trees = True

    def check(self, proposal: Proposal) -> None:
        verdicts.check_independent(proposal, "k-sequential selection")

    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        (B, M, _), N = target_probs_BMV.shape, proposal.tokens.shape[1]
        accept, residuals_BMV = selection(proposal, target_probs_BMV)
        accepted = sampling.uniforms(keys_B, sampling.ACCEPT, N) < accept
        uniforms = sampling.uniforms(keys_B, sampling.NEXT, 2 * M).reshape(B, M, 2)
        drawn = sampling.draw(residuals_BMV, uniforms)
        return match.walk(proposal, drawn, jnp.sum(residuals_BMV, axis=-1), accepted)

    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        parents = verdicts.parents_of(proposal)
        accept, residuals_BMV = selection(proposal, target_probs_BMV)
        mass = jnp.sum(residuals_BMV, axis=-1, keepdims=True)
        # Where the residual is rounding only, its compiled sum may be far less than its entries.
        residuals_BMV = jnp.minimum(residuals_BMV / jnp.where(mass == 0, 1, mass), 1)
        same = tree.siblings(parents)
        all_rejected = jnp.prod(jnp.where(same, 1 - accept[:, None], 1), axis=2)
        drawn = all_rejected * match.drawn_probs(proposal, residuals_BMV)
        return verdicts.with_ancestors(parents, verdicts.first_accepted(parents, accept) + drawn)


def selection(proposal: Proposal, target_probs_BMV: Array) -> tuple[Array, Array]:
    """Returns the probability to accept each child [B, N], and the residuals [B, M, V]."""
    parents, M = verdicts.parents_of(proposal), target_probs_BMV.shape[1]
    draft_probs = verdicts.probs_of(proposal)
    target_at, draft_at = (
        verdicts.at_tokens(proposal, probs) for probs in (target_probs_BMV, draft_probs)
    )
    # A token of draft probability 0 cannot have been drawn. It counts as absent.
    present = verdicts.offered(proposal) & ~(draft_at <= 0)
    is_child = (parents[:, None] == jnp.arange(M)[:, None]) & present[:, None]
    children = jnp.sum(is_child, axis=2).astype(target_probs_BMV.dtype)  # [B, M]
    rho = divisor(draft_probs, target_probs_BMV, children)
    # The paper's beta(rho) = sum of min(draft, target / rho): the acceptance of a single child.
    common = jnp.minimum(draft_probs, target_probs_BMV / rho[..., None])
    beta = jnp.sum(common, axis=-1)
    any_accepted = 1 - jnp.maximum(1 - beta, 0) ** children
    scale = jnp.where(beta == 0, 0, any_accepted / jnp.where(beta == 0, 1, beta))
    residual = jnp.maximum(target_probs_BMV - common * scale[..., None], 0)
    # The residual is 0 where a child is accepted with certainty, to rounding.
    is_empty = jnp.sum(residual, axis=-1, keepdims=True) == 0
    residual = jnp.where(is_empty, target_probs_BMV, residual)
    rho_at = jnp.take_along_axis(rho, parents, axis=1)
    accept = jnp.where(present, target_at / (rho_at * jnp.where(present, draft_at, 1)), 0)
    return jnp.minimum(accept, 1), residual


def divisor(draft_probs: Array, target_probs: Array, children: Array) -> Array:
    """Returns rho for k children, by bisection in [1, k]: [..., V], [..., V], [...] -> [...].

    It is the root of 1 - (1 - beta)**k = rho beta, where beta is the sum of
    min(draft, target / rho). The root is rounded up, because a smaller divisor would be biased.
    """

    def narrow(_: int, interval: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = interval
        middle = (low + high) / 2
        beta = jnp.sum(jnp.minimum(draft_probs, target_probs / middle[..., None]), axis=-1)
        # Sides that are equal to rounding count as below: both are 1 in a whole interval if target
        # and draft agree.
        above = 1 - jnp.maximum(1 - beta, 0) ** children > middle * beta * (1 + slack)
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    slack = 8 * jnp.finfo(target_probs.dtype).eps
    ones = jnp.ones_like(children)
    return lax.fori_loop(0, _BISECTIONS, narrow, (ones, jnp.maximum(children, 1)))[1]
