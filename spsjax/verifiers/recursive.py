"""Recursive rejection sampling on a tree: the children of a node are tried one after another.

**Lossless** for children that were drawn from the draft's distribution, independently or without
replacement, and for deterministic ones (Miao et al. 2023, arXiv 2305.09781, Algorithm 2; Jeon et
al. 2024, arXiv 2402.14160). On a chain it is modified rejection sampling.
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.verifiers import base, rejection, siblings, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Walks from the root to the first child that is accepted, until there is none. Lossless.

    A rejected child leaves less of the target's distribution to its later siblings, and to the
    token that is drawn when all are rejected. A chain is judged as `rejection` does it.
    """

    lossless = True
    trees = True

    def verify(self, keys_B, proposal, target_probs):
        if proposal.parents is None:
            return rejection.rejection(keys_B, proposal, target_probs)
        parents = verdicts.parents_of(proposal)
        accept, _, left = siblings.reject_in_turn(proposal, target_probs, joint=False)
        accepted = sampling.uniforms(keys_B, sampling.ACCEPT, accept.shape[1]) < accept
        last = verdicts.last_reached(parents, verdicts.first_siblings(parents, accepted))
        left = jnp.take_along_axis(left, last[:, None, None], axis=1)[:, 0]
        return verdicts.conclude(keys_B, proposal.tokens, tree.path_to(parents, last), left)

    def accept_probs(self, proposal, target_probs):
        parents = verdicts.parents_of(proposal)
        accept, _, _ = siblings.reject_in_turn(proposal, target_probs, joint=False)
        return verdicts.with_ancestors(parents, verdicts.first_accepted(parents, accept))
