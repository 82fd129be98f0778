"""Base class of **lossy** rules, which accept tokens that are probable enough."""

import abc

import jax.numpy as jnp

from spsjax import tree
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import base, verdicts


class Approximate(base.Verifier):
    """Accepts the longest path of tokens that meet a criterion. Lossy, but exact in greedy rows.

    Of several longest paths it accepts the most probable one.
    """

    lossless = False
    trees = True

    @abc.abstractmethod
    def is_acceptable(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        """Returns [B, N] bool: whether a draft token is accepted if its parent is."""

    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        last = self._last(proposal, target_probs_BMV)
        path = tree.path_to(verdicts.parents_of(proposal), last)
        next_probs_BV = jnp.take_along_axis(target_probs_BMV, last[:, None, None], axis=1)[:, 0]
        return verdicts.conclude(keys_B, proposal.tokens, path, next_probs_BV)

    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        above = tree.ancestors(verdicts.parents_of(proposal))
        last = self._last(proposal, target_probs_BMV)[:, None, None]
        return jnp.take_along_axis(above, last, axis=1)[:, 0, 1:].astype(target_probs_BMV.dtype)

    def _last(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        """Returns the last node [B] of the accepted path."""
        parents = verdicts.parents_of(proposal)
        accepted = self.is_acceptable(proposal, target_probs_BMV)
        reached = tree.reached(parents, accepted & verdicts.offered(proposal))
        above, depth = tree.ancestors(parents), tree.depths(parents)
        probs = verdicts.at_tokens(proposal, target_probs_BMV)
        log_probs = jnp.pad(jnp.log(jnp.where(accepted, probs, 1)), ((0, 0), (1, 0)))
        path_log_probs = jnp.sum(jnp.where(above, log_probs[:, None], 0), axis=2)
        longest = reached & (depth == jnp.max(jnp.where(reached, depth, 0), axis=1, keepdims=True))
        return jnp.argmax(jnp.where(longest, path_log_probs, -jnp.inf), axis=1).astype(jnp.int32)
