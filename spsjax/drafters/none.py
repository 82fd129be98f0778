"""No drafting: autoregressive sampling as the loop's case K = 0 (Chen et al. 2023, Algorithm 1)."""

import dataclasses

import jax.numpy as jnp

from spsjax.drafters import base
from spsjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Proposes nothing. Lossless."""

    num_speculative_tokens: int = 0

    def propose(self, params, state, tokens_BS, lengths_B, rows, keys_B, depths_B=None):
        return Proposal(jnp.zeros((tokens_BS.shape[0], 0), jnp.int32), None), ()
