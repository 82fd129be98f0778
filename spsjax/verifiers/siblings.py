"""Residual of the target's distribution at a node after its children are rejected in order."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.types import Array, Proposal, PyTree
from spsjax.verifiers import verdicts


def reject_children(
    proposal: Proposal, target_probs_BMV: Array, joint: bool
) -> tuple[Array, Array, Array]:
    """Returns acceptance probabilities and residuals if all children are rejected in order.

    A node has a target distribution, a draft distribution and a weight, initially 1. A child is
    accepted with probability min(1, weight target / draft) at its token. When it is rejected, the
    node's target becomes max(weight target - draft, 0), normalised. A child changes the target and
    the draft of its parent only. If `joint`, it also changes weights.

    Args:
        proposal: N draft tokens per row. Each was drawn from the draft without the earlier
            siblings' tokens, unless the proposal is `Independent`.
        target_probs_BMV: distribution of the target at every node [B, M, V].
        joint: whether the weight of a node is its acceptance probability, so that a path is tested
            as a whole (see `traversal`); else all weights stay 1.

    Returns:
        The probability to accept each child when its earlier siblings were rejected [B, N]. The
        weights [B, M] and targets [B, M, V] when all children were rejected.
    """
    parents, offered = verdicts.parents_of(proposal), verdicts.offered(proposal)
    reject = functools.partial(_reject_in_row, not verdicts.independent(proposal), joint)
    return jax.vmap(reject)(proposal.tokens, parents, offered, proposal.probs, target_probs_BMV)


def _reject_in_row(
    distinct: bool,
    joint: bool,
    tokens_N: Array,
    parents_N: Array,
    offered_N: Array,
    probs_PV: Array | None,
    target_MV: Array,
) -> tuple[Array, Array, Array]:
    """Does what `reject_children` does for one row."""
    M, V = target_MV.shape
    if probs_PV is not None:
        probs_PV = jnp.pad(probs_PV, ((0, M - len(probs_PV)), (0, 0)))

    def reject(carry: PyTree, child: tuple[Array, ...]) -> tuple[PyTree, Array]:
        targets, weights, drafts = carry
        node, token, parent, present = child
        target, weight = targets[parent], weights[parent]
        is_token = jnp.arange(V) == token
        draft = is_token.astype(target.dtype) if drafts is None else drafts[parent]
        scaled, draft_at = weight * target[jnp.maximum(token, 0)], draft[jnp.maximum(token, 0)]
        # A token of draft probability 0 cannot have been drawn. It counts as absent.
        present &= ~(draft_at <= 0)
        accept = jnp.where(scaled >= draft_at, 1, scaled / jnp.where(present, draft_at, 1))
        accept = jnp.where(present, accept, 0)
        residual = jnp.maximum(weight * target - draft, 0)
        mass = jnp.sum(residual)
        # The residual is 0 where target and draft agree to rounding. Then the target stays as it
        # is: a rejection there has a probability of the order of the rounding error.
        residual = jnp.where(mass == 0, target, residual / jnp.where(mass == 0, 1, mass))
        targets = targets.at[parent].set(jnp.where(present, residual, target))
        if joint:
            # The parent's new weight: mass / (mass + 1 - weight), as in block verification.
            whole = mass + (1 - weight)
            remaining = jnp.where(whole == 0, 1, mass / jnp.where(whole == 0, 1, whole))
            weights = weights.at[parent].set(jnp.where(present, remaining, weight))
            weights = weights.at[node].set(accept)
        if distinct and drafts is not None:
            others = jnp.where(is_token, 0, draft)
            total = jnp.sum(others)
            others = others / jnp.where(total == 0, 1, total)
            # Also for a token that is not eligible: later siblings were drawn without it.
            drafts = drafts.at[parent].set(others)
        return (targets, weights, drafts), accept

    carry = target_MV, jnp.ones(M, target_MV.dtype), probs_PV
    children = jnp.arange(1, M), tokens_N, parents_N, offered_N
    (targets, weights, _), accept = lax.scan(reject, carry, children)
    return accept, weights, targets
