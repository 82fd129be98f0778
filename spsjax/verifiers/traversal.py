"""Traversal verification of a tree: whole paths are tested, from the leaves to the root.

**Lossless** for children that were drawn from the draft's distribution, independently or without
replacement (Weng et al. 2025, arXiv 2505.12398). On a chain it is block verification.
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.errors import InputError
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import base, siblings, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Tests the paths to all nodes in post-order, and accepts the first that passes. Lossless.

    When a node is rejected, the target and the weight of its parent change
    (`siblings.reject_children`). The root always passes.
    """

    lossless = True
    trees = True

    def check(self, proposal: Proposal) -> None:
        if proposal.probs is None:
            raise InputError(
                "verifier: expected a drafter with distributions for traversal verification, "
                'found one of point masses. Use "match"'
            )

    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        parents = verdicts.parents_of(proposal)
        _, weights, residuals_BMV = siblings.reject_children(proposal, target_probs_BMV, joint=True)
        M = weights.shape[1]
        root = jnp.arange(M) == 0
        uniforms = sampling.uniforms(keys_B, sampling.ACCEPT, M - 1)
        passed = root | (jnp.pad(uniforms, ((0, 0), (1, 0))) < weights)
        order = tree.postorder(parents)
        first = jnp.min(jnp.where(passed, order, M), axis=1)
        last = jnp.argmax(order == first[:, None], axis=1).astype(jnp.int32)
        next_probs = jnp.take_along_axis(residuals_BMV, last[:, None, None], axis=1)[:, 0]
        # A path that cannot be tested might have been accepted, so the row is reported.
        untested = jnp.any(~jnp.isfinite(weights) & (order <= first[:, None]), axis=1)
        next_probs = jnp.where(untested[:, None], jnp.nan, next_probs)
        return verdicts.conclude(keys_B, proposal.tokens, tree.path_to(parents, last), next_probs)

    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        parents = verdicts.parents_of(proposal)
        _, weights, _ = siblings.reject_children(proposal, target_probs_BMV, joint=True)
        order = tree.postorder(parents)
        before = order[:, None] < order[:, :, None]
        # The probability that a node is the last one of the accepted path.
        last = weights * jnp.prod(jnp.where(before, 1 - weights[:, None], 1), axis=2)
        above = tree.ancestors(parents)
        return jnp.sum(jnp.where(above, last[..., None], 0), axis=1)[:, 1:]
