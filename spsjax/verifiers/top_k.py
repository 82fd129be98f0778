"""Acceptance of the target's best tokens (Stern et al. 2018, arXiv 1811.03115, 5.1). **Lossy.**

A draft token is accepted if it is among the k most probable ones of the target. The paper decodes
greedily with it. Here greedy rows stay exact, as with every rule, and it acts on sampled ones.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from spsjax.errors import check_integer
from spsjax.verifiers import approximate, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(approximate.Approximate):
    """Accepts the longest path of tokens among the target's k best ones. Lossy, not if greedy.

    Tokens of probability 0, filtered ones too, are never accepted.

    Attributes:
        k: how many tokens are good enough.
    """

    k: int = 2

    def __post_init__(self):
        check_integer("k", self.k, 1)

    def good_enough(self, proposal, target_probs):
        probs, parents = verdicts.at_tokens(proposal, target_probs), verdicts.parents_of(proposal)
        k = min(self.k, target_probs.shape[-1])
        least = lax.top_k(target_probs, k)[0][..., -1]
        return (probs > 0) & (probs >= jnp.take_along_axis(least, parents, axis=1))
