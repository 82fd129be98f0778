"""Base class of rules that accept whatever is probable enough. They are **lossy**."""

import abc

import jax.numpy as jnp

from spsjax import tree
from spsjax.types import Array, Proposal
from spsjax.verifiers import base, verdicts


class Approximate(base.Verifier):
    """Accepts the longest path of tokens that are good enough. Lossy, not if greedy.

    Of several longest paths the most probable one is taken.
    """

    lossless = False
    trees = True

    @abc.abstractmethod
    def good_enough(self, proposal: Proposal, target_probs: Array) -> Array:
        """Returns [B, N] bool: the draft tokens that are accepted if their parents are."""

    def verify(self, keys_B, proposal, target_probs):
        last = self._last(proposal, target_probs)
        path = tree.path_to(verdicts.parents_of(proposal), last)
        left = jnp.take_along_axis(target_probs, last[:, None, None], axis=1)[:, 0]
        return verdicts.conclude(keys_B, proposal.tokens, path, left)

    def accept_probs(self, proposal, target_probs):
        above = tree.ancestors(verdicts.parents_of(proposal))
        last = self._last(proposal, target_probs)[:, None, None]
        return jnp.take_along_axis(above, last, axis=1)[:, 0, 1:].astype(target_probs.dtype)

    def _last(self, proposal, target_probs):
        """Returns the last node [B] of the path."""
        parents = verdicts.parents_of(proposal)
        accepted = self.good_enough(proposal, target_probs)
        reached = tree.reached(parents, accepted & verdicts.offered(proposal))
        above, depth = tree.ancestors(parents), tree.depths(parents)
        probs = verdicts.at_tokens(proposal, target_probs)
        log_probs = jnp.pad(jnp.log(jnp.where(accepted, probs, 1)), ((0, 0), (1, 0)))
        of_path = jnp.sum(jnp.where(above, log_probs[:, None], 0), axis=2)
        longest = reached & (depth == jnp.max(jnp.where(reached, depth, 0), axis=1, keepdims=True))
        return jnp.argmax(jnp.where(longest, of_path, -jnp.inf), axis=1).astype(jnp.int32)
