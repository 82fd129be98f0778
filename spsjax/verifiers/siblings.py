"""The rest of the target's distribution at a node whose children were rejected."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.types import Array, Proposal
from spsjax.verifiers import verdicts


def reject_in_turn(
    proposal: Proposal, target_probs: Array, joint: bool
) -> tuple[Array, Array, Array]:
    """Rejects every child of every node, in the order in which they were drawn.

    A node has a target distribution, a draft distribution and a weight, at first 1. A child is
    accepted with probability min(1, weight target / draft), taken at its token. When it is
    rejected, the node's target becomes max(weight target - draft, 0), normalised. The children of
    one node change no other node, except for the weights if `joint`.

    Args:
        proposal: N draft tokens per row. Each was drawn from the draft without the earlier
            siblings' tokens, unless the proposal is `Independent`.
        target_probs: [B, M, V], the distribution that should have been sampled at each node.
        joint: whether the acceptance of a node is its weight, so that a path is judged as a whole
            (see `traversal`); else all weights stay 1.

    Returns:
        [B, N] probabilities to accept each child when its earlier siblings were rejected, [B, M]
        weights and [B, M, V] targets when all children are rejected.
    """
    parents, alive = verdicts.parents_of(proposal), verdicts.offered(proposal)
    reject = functools.partial(_reject_in_row, not verdicts.independent(proposal), joint)
    return jax.vmap(reject)(proposal.tokens, parents, alive, proposal.probs, target_probs)


def _reject_in_row(distinct, joint, tokens_N, parents_N, alive_N, probs_PV, target_MV):
    M, V = target_MV.shape
    if probs_PV is not None:
        probs_PV = jnp.pad(probs_PV, ((0, M - len(probs_PV)), (0, 0)))

    def reject(carry, child):
        targets, weights, drafts = carry
        node, token, parent, alive = child
        target, weight = targets[parent], weights[parent]
        is_token = jnp.arange(V) == token
        draft = is_token.astype(target.dtype) if drafts is None else drafts[parent]
        scaled, draft_at = weight * target[jnp.maximum(token, 0)], draft[jnp.maximum(token, 0)]
        # A token of draft probability 0 was not drawn: it counts as not proposed.
        alive &= ~(draft_at <= 0)
        accept = jnp.where(scaled >= draft_at, 1, scaled / jnp.where(alive, draft_at, 1))
        accept = jnp.where(alive, accept, 0)
        left = jnp.maximum(weight * target - draft, 0)
        mass = jnp.sum(left)
        # Nothing is left where the two agree to rounding. Then the target stays as it is; a
        # rejection there has a probability of the order of the rounding.
        left = jnp.where(mass == 0, target, left / jnp.where(mass == 0, 1, mass))
        targets = targets.at[parent].set(jnp.where(alive, left, target))
        if joint:
            whole = mass + (1 - weight)
            remaining = jnp.where(whole == 0, 1, mass / jnp.where(whole == 0, 1, whole))
            weights = weights.at[parent].set(jnp.where(alive, remaining, weight))
            weights = weights.at[node].set(accept)
        if distinct and drafts is not None:
            rest = jnp.where(is_token, 0, draft)
            total = jnp.sum(rest)
            rest = rest / jnp.where(total == 0, 1, total)
            # Also without a token that is not eligible: the later siblings were drawn without it.
            drafts = drafts.at[parent].set(rest)
        return (targets, weights, drafts), accept

    carry = target_MV, jnp.ones(M, target_MV.dtype), probs_PV
    children = jnp.arange(1, M), tokens_N, parents_N, alive_N
    (targets, weights, _), accept = lax.scan(reject, carry, children)
    return accept, weights, targets
