"""Verification by matching: the target draws at every node, and the child with that token wins.

**Lossless** for any proposal, chain or tree, however its tokens were chosen, as long as that did
not depend on these draws: the emitted tokens are the target's own draws. For a chain it accepts
less than rejection sampling does; for tokens that are chosen deterministically there is nothing
better that looks at one path (Miao et al. 2023, arXiv 2305.09781, naive sampling).
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import base, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Walks from the root to the child that equals the target's draw, until there is none.

    Lossless. Every node has one draw, whatever paths lead to it.
    """

    lossless = True
    trees = True

    def verify(self, keys_B, proposal, target_probs):
        B, M, _ = target_probs.shape
        uniforms = sampling.uniforms(keys_B, sampling.NEXT, 2 * M).reshape(B, M, 2)
        return walk(proposal, sampling.draw(target_probs, uniforms), jnp.sum(target_probs, axis=-1))

    def accept_probs(self, proposal, target_probs):
        parents = verdicts.parents_of(proposal)
        return verdicts.with_ancestors(parents, drawn_probs(proposal, target_probs))


def drawn_probs(proposal: Proposal, probs_BMV: Array) -> Array:
    """Returns [B, N]: how probable each draft token is as its parent's draw.

    Of siblings with the same token, only the first one that is offered can be it.
    """
    parents, tokens = verdicts.parents_of(proposal), proposal.tokens
    offered = verdicts.offered(proposal)
    twins = jnp.tril(tree.siblings(parents), -1) & (tokens[:, :, None] == tokens[:, None])
    first = offered & ~jnp.any(twins & offered[:, None], axis=2)
    return jnp.where(first, verdicts.at_tokens(proposal, probs_BMV), 0)


def walk(
    proposal: Proposal, drawn_BM: Array, mass_BM: Array, accepted_BN: Array | None = None
) -> Verdict:
    """Returns the verdict of a walk: to an accepted child, else to one that equals the draw.

    Args:
        proposal: N draft tokens per row.
        drawn_BM: the token drawn at each node, in case that no child is accepted.
        mass_BM: sum of each node's distribution; not finite or 0 where nothing could be drawn.
        accepted_BN: draft tokens that are accepted if their parent is reached. Of several siblings
            the first one counts. None: no token is.
    """
    parents, accepted = verdicts.parents_of(proposal), accepted_BN
    if accepted is None:
        accepted = jnp.zeros(parents.shape, bool)
    # Nothing can be drawn from such a node, so no child of it is accepted.
    drawable = jnp.isfinite(mass_BM) & (mass_BM > 0)
    equal = proposal.tokens == jnp.take_along_axis(drawn_BM, parents, axis=1)
    equal &= jnp.take_along_axis(drawable, parents, axis=1)
    equal &= ~jnp.any(tree.siblings(parents) & accepted[:, None], axis=2)
    chosen = verdicts.first_siblings(parents, (accepted | equal) & verdicts.offered(proposal))
    last = verdicts.last_reached(parents, chosen)[:, None]
    drawn, mass = (jnp.take_along_axis(array, last, axis=1)[:, 0] for array in (drawn_BM, mass_BM))
    return verdicts.emit(proposal.tokens, tree.path_to(parents, last[:, 0]), drawn, mass)
