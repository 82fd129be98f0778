"""Acceptance at a given rate, to time speculative sampling without a trained pair."""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling
from spsjax.errors import InputError, short_repr
from spsjax.utils import traced
from spsjax.verifiers import base, rejection


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Accepts each draft token with one probability, whatever the distributions. Not lossless.

    Otherwise it computes and draws what modified rejection sampling does, at the same cost. The
    texts mean nothing: it is for timing alone.
    """

    acceptance: float = traced.number()  # the probability, in [0, 1]

    lossless = False

    def __post_init__(self):
        number = isinstance(self.acceptance, (int, float)) and not isinstance(self.acceptance, bool)
        if not number or not 0 <= self.acceptance <= 1:
            raise InputError(
                f"acceptance: expected a number in [0, 1], found {short_repr(self.acceptance)}"
            )

    def accept_probs(self, proposal, target_probs):
        accept = jnp.where(proposal.tokens >= 0, self.acceptance, 0.0)
        return jnp.cumprod(accept, axis=1)

    def verify(self, keys_B, proposal, target_probs):
        uniforms = sampling.uniforms(keys_B, sampling.ACCEPT, proposal.tokens.shape[1])
        accepted = (uniforms < self.acceptance) & (proposal.tokens >= 0)
        count = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1, dtype=jnp.int32)
        return rejection.accept_first(keys_B, proposal, target_probs, count)
