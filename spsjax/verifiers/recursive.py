"""Recursive rejection sampling on a tree: the children of a node are tested one after another.

**Lossless** for children that were drawn from the draft's distribution, independently or without
replacement, and for children that were chosen deterministically (Miao et al. 2023, arXiv
2305.09781, Algorithm 2; Jeon et al. 2024, arXiv 2402.14160). On a chain it is modified rejection
sampling.
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import base, rejection, siblings, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Walks from the root to the first accepted child, as long as there is one. Lossless.

    When a child is rejected, the residual replaces the target's distribution for its later
    siblings. If all are rejected, a token is drawn from the last residual. Chains are verified by
    `rejection`.
    """

    lossless = True
    trees = True

    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        if proposal.parents is None:
            return rejection.rejection(keys_B, proposal, target_probs_BMV)
        parents = verdicts.parents_of(proposal)
        accept, _, residuals_BMV = siblings.reject_children(proposal, target_probs_BMV, joint=False)
        accepted = sampling.uniforms(keys_B, sampling.ACCEPT, accept.shape[1]) < accept
        last = verdicts.last_reached(parents, verdicts.first_siblings(parents, accepted))
        next_probs = jnp.take_along_axis(residuals_BMV, last[:, None, None], axis=1)[:, 0]
        return verdicts.conclude(keys_B, proposal.tokens, tree.path_to(parents, last), next_probs)

    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        parents = verdicts.parents_of(proposal)
        accept, _, _ = siblings.reject_children(proposal, target_probs_BMV, joint=False)
        return verdicts.with_ancestors(parents, verdicts.first_accepted(parents, accept))
