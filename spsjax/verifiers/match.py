"""Verification by matching: a token is drawn from the target at every node, and compared.

**Lossless** for any chain or tree whose tokens do not depend on these draws, because the emitted
tokens are the target's own draws (Miao et al. 2023, arXiv 2305.09781, naive sampling). For drawn
tokens it accepts fewer than rejection sampling. For tokens that were chosen deterministically, no
rule that follows one path accepts more.
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import base, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Walks from the root to the child that equals the target's draw, as long as there is one.

    Lossless. Every node has one draw.
    """

    lossless = True
    trees = True

    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        B, M, _ = target_probs_BMV.shape
        uniforms = sampling.uniforms(keys_B, sampling.NEXT, 2 * M).reshape(B, M, 2)
        drawn_BM = sampling.draw(target_probs_BMV, uniforms)
        return walk(proposal, drawn_BM, jnp.sum(target_probs_BMV, axis=-1))

    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        parents = verdicts.parents_of(proposal)
        return verdicts.with_ancestors(parents, drawn_probs(proposal, target_probs_BMV))


def drawn_probs(proposal: Proposal, probs_BMV: Array) -> Array:
    """Returns the probability [B, N] that the draw at a token's parent selects the token.

    Of siblings with the same token, only the first eligible one can be selected.
    """
    parents, tokens = verdicts.parents_of(proposal), proposal.tokens
    offered = verdicts.offered(proposal)
    twins = jnp.tril(tree.siblings(parents), -1) & (tokens[:, :, None] == tokens[:, None])
    first = offered & ~jnp.any(twins & offered[:, None], axis=2)
    return jnp.where(first, verdicts.at_tokens(proposal, probs_BMV), 0)


def walk(
    proposal: Proposal, drawn_BM: Array, mass_BM: Array, accepted_BN: Array | None = None
) -> Verdict:
    """Returns the verdict of a walk to accepted children, else to children that equal the draw.

    Args:
        proposal: N draft tokens per row.
        drawn_BM: token drawn at each node, which is used if no child is accepted.
        mass_BM: sum of the distribution at each node; not finite or 0: no token could be drawn.
        accepted_BN: whether a draft token is accepted if its parent is reached; of several accepted
            siblings the first one counts. None: no token is accepted.
    """
    parents, accepted = verdicts.parents_of(proposal), accepted_BN
    if accepted is None:
        accepted = jnp.zeros(parents.shape, bool)
    # No child is accepted at a node whose distribution is invalid, so that the row is reported.
    drawable = jnp.isfinite(mass_BM) & (mass_BM > 0)
    equal = proposal.tokens == jnp.take_along_axis(drawn_BM, parents, axis=1)
    equal &= jnp.take_along_axis(drawable, parents, axis=1)
    equal &= ~jnp.any(tree.siblings(parents) & accepted[:, None], axis=2)
    chosen = verdicts.first_siblings(parents, (accepted | equal) & verdicts.offered(proposal))
    last = verdicts.last_reached(parents, chosen)[:, None]
    drawn, mass = (jnp.take_along_axis(array, last, axis=1)[:, 0] for array in (drawn_BM, mass_BM))
    return verdicts.emit(proposal.tokens, tree.path_to(parents, last[:, 0]), drawn, mass)
