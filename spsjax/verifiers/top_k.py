"""Top-k acceptance, **lossy** (Stern et al. 2018, arXiv 1811.03115, section 5.1).

A draft token is accepted if it is among the target's k most probable tokens. The paper uses the
rule in greedy decoding. Here it applies to sampled rows only, and greedy rows are exact as with
every rule.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from spsjax.types import Array, Proposal
from spsjax.utils.fields import integer
from spsjax.verifiers import approximate, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(approximate.Approximate):
    """Accepts the longest path of tokens among the target's k best. Lossy, but exact if greedy.

    Tokens of probability 0, such as filtered tokens, are never accepted.

    Attributes:
        k: number of acceptable tokens.
    """

    k: int = integer(2, 1)

    def is_acceptable(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        parents = verdicts.parents_of(proposal)
        probs = verdicts.at_tokens(proposal, target_probs_BMV)
        k = min(self.k, target_probs_BMV.shape[-1])
        kth_BM = lax.top_k(target_probs_BMV, k)[0][..., -1]  # the k-th highest probability
        return (probs > 0) & (probs >= jnp.take_along_axis(kth_BM, parents, axis=1))
