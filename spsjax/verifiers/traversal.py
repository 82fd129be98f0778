"""Traversal verification of a tree: paths are judged as a whole, from the leaves to the root.

**Lossless** for children that were drawn from the draft's distribution, independently or without
replacement (Weng et al. 2025, arXiv 2505.12398). On a chain it is block verification.
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.errors import InputError
from spsjax.verifiers import base, siblings, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Tests the paths to all nodes, leaves first, and accepts the first that passes. Lossless.

    Each node is tested after all below it. When it is rejected, its parent's distribution and
    weight change as `siblings.reject_in_turn` says. The root always passes.
    """

    lossless = True
    trees = True

    def check(self, proposal):
        if proposal.probs is None:
            raise InputError(
                "verifier: expected a drafter with distributions for traversal verification, "
                'found one of point masses. Use "match"'
            )

    def verify(self, keys_B, proposal, target_probs):
        parents = verdicts.parents_of(proposal)
        _, weights, left = siblings.reject_in_turn(proposal, target_probs, joint=True)
        M = weights.shape[1]
        root = jnp.arange(M) == 0
        uniforms = sampling.uniforms(keys_B, sampling.ACCEPT, M - 1)
        passed = root | (jnp.pad(uniforms, ((0, 0), (1, 0))) < weights)
        turn = tree.turns(parents)
        first = jnp.min(jnp.where(passed, turn, M), axis=1)
        last = jnp.argmax(turn == first[:, None], axis=1).astype(jnp.int32)
        left = jnp.take_along_axis(left, last[:, None, None], axis=1)[:, 0]
        # A path that cannot be tested might have been accepted.
        untested = jnp.any(~jnp.isfinite(weights) & (turn <= first[:, None]), axis=1)
        left = jnp.where(untested[:, None], jnp.nan, left)
        return verdicts.conclude(keys_B, proposal.tokens, tree.path_to(parents, last), left)

    def accept_probs(self, proposal, target_probs):
        parents = verdicts.parents_of(proposal)
        _, weights, _ = siblings.reject_in_turn(proposal, target_probs, joint=True)
        turn = tree.turns(parents)
        before = turn[:, None] < turn[:, :, None]
        last = weights * jnp.prod(jnp.where(before, 1 - weights[:, None], 1), axis=2)
        above = tree.ancestors(parents)  # a path is accepted up to its last node
        return jnp.sum(jnp.where(above, last[..., None], 0), axis=1)[:, 1:]
