"""Verdicts from decisions about draft tokens, and functions of proposals that verifiers share."""

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.errors import InputError
from spsjax.types import Array, Independent, Proposal, Verdict


def conclude(keys_B: Array, tokens_BN: Array, path_BP: Array, next_probs_BV: Array) -> Verdict:
    """Returns the verdict that accepts the nodes of a path and draws the next token.

    Args:
        keys_B: one key per row and round.
        tokens_BN: draft tokens.
        path_BP: the root, the accepted nodes, then -1.
        next_probs_BV: distribution of the next token, which need not be normalised.
    """
    drawn = sampling.draw(next_probs_BV, sampling.uniforms(keys_B, sampling.NEXT, 2))
    return emit(tokens_BN, path_BP, drawn, jnp.sum(next_probs_BV, axis=-1))


def accept_nothing(keys_B: Array, tokens_BN: Array, target_BV: Array) -> Verdict:
    """Returns the verdict that draws the next token from the target."""
    return conclude(keys_B, tokens_BN, chain_path(jnp.zeros(len(target_BV), int), 0), target_BV)


def emit(tokens_BN: Array, path_BP: Array, drawn_B: Array, mass_B: Array) -> Verdict:
    """Returns the verdict of a path and a token that was drawn after it.

    `mass_B` is the sum of the distribution from which the token was drawn. If it is 0 or not
    finite, the row is not valid, and the token is dropped.
    """
    count = jnp.sum(path_BP >= 0, axis=1, dtype=jnp.int32) - 1
    valid = jnp.isfinite(mass_B) & (mass_B > 0)
    column = jnp.arange(path_BP.shape[1], dtype=jnp.int32)
    # Column i holds the token of the path's node i + 1, which is draft token path[i + 1] - 1.
    following = jnp.pad(path_BP[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    padded = jnp.pad(tokens_BN, ((0, 0), (1, 0)), constant_values=-1)
    emitted = jnp.where(following >= 0, tree.along(following, padded), -1)
    last = (column == count[:, None]) & valid[:, None]
    emitted = jnp.where(last, drawn_B[:, None], emitted)
    return Verdict(tokens=emitted, num_tokens=count + valid, path=path_BP, valid=valid)


def chain_path(count_B: Array, num_tokens: int) -> Array:
    """Returns the path [B, N+1] of the first `count_B` tokens of a chain of N."""
    node = jnp.arange(num_tokens + 1, dtype=jnp.int32)
    return jnp.where(node <= count_B[:, None], node, -1)


def parents_of(proposal: Proposal) -> Array:
    """Returns the parents [B, N] of a proposal, which may be a chain."""
    return tree.chain(*proposal.tokens.shape) if proposal.parents is None else proposal.parents


def probs_of(proposal: Proposal) -> Array:
    """Returns the draft's distributions [B, M, V], which are 0 at nodes without one.

    The proposal is not of point masses (`check_independent`).
    """
    probs, M = proposal.probs, proposal.tokens.shape[1] + 1
    assert probs is not None
    return jnp.pad(probs, ((0, 0), (0, M - probs.shape[1]), (0, 0)))


def offered(proposal: Proposal) -> Array:
    """Returns [B, N] bool: whether a draft token exists and may be accepted."""
    exists = proposal.tokens >= 0
    return exists if proposal.eligible is None else exists & proposal.eligible


def independent(proposal: Proposal) -> bool:
    """Returns whether siblings were drawn independently of each other; true for chains."""
    return proposal.parents is None or isinstance(proposal, Independent)


def check_independent(proposal: Proposal, rule: str) -> None:
    """Raises InputError if siblings were not drawn independently of each other."""
    if proposal.probs is None or not independent(proposal):
        kind = "point masses" if proposal.probs is None else "children without replacement"
        raise InputError(
            f"verifier: expected a drafter of independent children for {rule}, found one of "
            f'{kind}. Use "recursive"'
        )


def at_tokens(proposal: Proposal, probs_BMV: Array) -> Array:
    """Returns the probability [B, N] of each draft token by the distribution at its parent."""
    rows = jnp.take_along_axis(probs_BMV, parents_of(proposal)[..., None], axis=1)
    index = jnp.maximum(proposal.tokens, 0)[..., None]
    return jnp.take_along_axis(rows, index, axis=2)[..., 0]


def first_siblings(parents_BN: Array, chosen_BN: Array) -> Array:
    """Returns [B, N] bool: whether a draft token is the first chosen child of its parent."""
    earlier = jnp.tril(tree.siblings(parents_BN), -1)
    return chosen_BN & ~jnp.any(earlier & chosen_BN[:, None], axis=2)


def first_accepted(parents_BN: Array, accept_BN: Array) -> Array:
    """Returns the probability [B, N] that a child is accepted after its earlier siblings failed.

    `accept_BN` are the probabilities of the single tests.
    """
    earlier = jnp.tril(tree.siblings(parents_BN), -1)
    return accept_BN * jnp.prod(jnp.where(earlier, 1 - accept_BN[:, None], 1), axis=2)


def with_ancestors(parents_BN: Array, probs_BN: Array) -> Array:
    """Returns the product [B, N] of the probabilities of a draft token and its ancestors."""
    above = tree.ancestors(parents_BN)[:, 1:, 1:]
    return jnp.prod(jnp.where(above, probs_BN[:, None], 1), axis=2)


def last_reached(parents_BN: Array, accepted_BN: Array) -> Array:
    """Returns the last node [B] of a walk from the root, where no two siblings are accepted."""
    node = jnp.arange(parents_BN.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(tree.reached(parents_BN, accepted_BN), node, 0), axis=1)
