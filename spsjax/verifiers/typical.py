"""Typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1). **Lossy.**

A draft token is accepted if the target does not find it too improbable, whatever it was drawn from.
The emitted tokens are more probable ones than the target's own.
"""

import dataclasses

import jax.numpy as jnp

from spsjax.errors import InputError, short_repr
from spsjax.types import Array
from spsjax.utils import traced
from spsjax.verifiers import approximate, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(approximate.Approximate):
    """Accepts the longest path of tokens that are typical of the target. Lossy, not if greedy.

    A token is typical if its probability exceeds min(epsilon, delta exp(-entropy)).

    Attributes:
        epsilon: probability that always suffices, in (0, 1].
        delta: factor of exp(-entropy), above 0.
    """

    epsilon: float = traced.number(0.09)
    delta: float = traced.number(0.3)

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

    def good_enough(self, proposal, target_probs):
        least = threshold(target_probs, self.epsilon, self.delta)
        least = jnp.take_along_axis(least, verdicts.parents_of(proposal), axis=1)
        return verdicts.at_tokens(proposal, target_probs) > least


def threshold(target_probs: Array, epsilon: float, delta: float) -> Array:
    """Returns the probability that a typical token exceeds: [..., V] -> [...]."""
    logs = jnp.log(jnp.where(target_probs > 0, target_probs, 1))
    entropy = -jnp.sum(target_probs * logs, axis=-1)
    return jnp.minimum(epsilon, delta * jnp.exp(-entropy))
