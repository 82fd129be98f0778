"""No drafting: autoregressive sampling as the loop's case K = 0 (Chen et al. 2023, Algorithm 1)."""

import dataclasses

import jax.numpy as jnp

from spsjax.drafters import base
from spsjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Proposes nothing. Lossless."""

    num_speculative_tokens: int = 0

    def propose(self, params, state, now):
        return Proposal(jnp.zeros((len(now.tokens), 0), jnp.int32), None)


def from_name(text: str, target):
    """Returns the drafter and its weights; nothing may stand behind its name."""
    base.check_alone("none", text)
    return Drafter(), {}
