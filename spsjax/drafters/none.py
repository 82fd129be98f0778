"""No drafting: autoregressive sampling, the loop with K = 0 (Chen et al. 2023, Algorithm 1)."""

import dataclasses

import jax.numpy as jnp

from spsjax.drafters import base
from spsjax.types import Proposal, PyTree, Round


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Proposes nothing. Lossless."""

    num_speculative_tokens: int = 0

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        return Proposal(jnp.zeros((len(now.tokens), 0), jnp.int32), None)


from_name = base.by_name_alone(Drafter)
