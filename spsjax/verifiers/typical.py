"""Typical acceptance, **lossy** (Cai et al. 2024, arXiv 2401.10774, section 2.3.1).

A draft token is accepted if its probability under the target exceeds a threshold, whatever the
draft's distribution. The emitted tokens are on average more probable than samples of the target.
"""

import dataclasses

import jax.numpy as jnp

from spsjax.errors import InputError, short_repr
from spsjax.types import Array, Proposal
from spsjax.utils import traced
from spsjax.verifiers import approximate, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(approximate.Approximate):
    """Accepts the longest path of tokens that are typical of the target. Lossy, exact if greedy.

    A token is typical if its probability exceeds min(epsilon, delta exp(-entropy)).

    Attributes:
        epsilon: probability above which a token is always typical, in (0, 1].
        delta: factor of exp(-entropy), above 0.
    """

    epsilon: float = traced.number(0.09)
    delta: float = traced.number(0.3)

    def __post_init__(self) -> None:
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

    def is_acceptable(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        bound = threshold(target_probs_BMV, self.epsilon, self.delta)
        bound = jnp.take_along_axis(bound, verdicts.parents_of(proposal), axis=1)
        return verdicts.at_tokens(proposal, target_probs_BMV) > bound


def threshold(target_probs: Array, epsilon: float, delta: float) -> Array:
    """Returns min(epsilon, delta exp(-entropy)), the paper's threshold: [..., V] -> [...]."""
    logs = jnp.log(jnp.where(target_probs > 0, target_probs, 1))
    entropy = -jnp.sum(target_probs * logs, axis=-1)
    return jnp.minimum(epsilon, delta * jnp.exp(-entropy))
