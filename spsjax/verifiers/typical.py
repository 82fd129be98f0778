"""Typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1). **Lossy.**

A draft token is accepted if the target does not find it too improbable, whatever it was drawn from.
The emitted tokens are more probable ones than the target's own.
"""

import dataclasses

import jax.numpy as jnp

from spsjax import tree
from spsjax.errors import InputError, short_repr
from spsjax.types import Array
from spsjax.verifiers import base, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Accepts the longest path of tokens that are typical of the target. Lossy, not if greedy.

    A token is typical if its probability exceeds min(epsilon, delta exp(-entropy)). Of several
    longest paths the most probable one is taken.

    Attributes:
        epsilon: probability that always suffices, in (0, 1].
        delta: factor of exp(-entropy), above 0.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    lossless = False
    trees = True

    def __post_init__(self):
        for name, most, interval in (
            ("epsilon", 1, "(0, 1]"),
            ("delta", float("inf"), "(0, infinity]"),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value <= most:
                raise InputError(
                    f"{name}: expected a number in {interval}, found {short_repr(value)}"
                )

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
        probs = verdicts.at_tokens(proposal, target_probs)
        least = threshold(target_probs, self.epsilon, self.delta)
        accepted = probs > jnp.take_along_axis(least, parents, axis=1)
        reached = tree.reached(parents, accepted & verdicts.offered(proposal))
        above, depth = tree.ancestors(parents), tree.depths(parents)
        log_probs = jnp.pad(jnp.log(jnp.where(accepted, probs, 1)), ((0, 0), (1, 0)))
        of_path = jnp.sum(jnp.where(above, log_probs[:, None], 0), axis=2)
        longest = reached & (depth == jnp.max(jnp.where(reached, depth, 0), axis=1, keepdims=True))
        return jnp.argmax(jnp.where(longest, of_path, -jnp.inf), axis=1).astype(jnp.int32)


def threshold(target_probs: Array, epsilon: float, delta: float) -> Array:
    """Returns the probability that a typical token exceeds: [..., V] -> [...]."""
    logs = jnp.log(jnp.where(target_probs > 0, target_probs, 1))
    entropy = -jnp.sum(target_probs * logs, axis=-1)
    return jnp.minimum(epsilon, delta * jnp.exp(-entropy))
