"""Modified rejection sampling of a chain (Chen et al. 2023; Leviathan et al. 2022).

**Lossless** at `lenience=1`: the emitted tokens follow the target's distribution exactly, whatever
the draft (Chen et al., arXiv 2302.01318, Algorithm 2 and Theorem 1; Leviathan et al., arXiv
2211.17192, appendix A.1). With one-hot distributions it is greedy verification: a draft token is
accepted if it is the target's choice.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import sampling
from spsjax.errors import InputError, short_repr
from spsjax.sampling import RowParams
from spsjax.types import Array, Proposal, Verdict
from spsjax.utils import traced
from spsjax.verifiers import base, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Accepts draft tokens one by one, each with probability min(1, target / (lenience draft)).

    Lossless at `lenience=1`, lossy below; `spsjax.lenience_bias` computes the bias.

    Attributes:
        lenience: number in (0, 1]; below 1, more draft tokens are accepted.
    """

    lenience: float = traced.number(1.0, off=1.0)

    def __post_init__(self) -> None:
        check_lenience(self.lenience)

    @property
    def lossless(self) -> bool:
        # A lenience of 1 stays static (`traced.number(off=1.0)`), so a traced one is below 1.
        return not isinstance(self.lenience, jax.core.Tracer) and self.lenience == 1

    def __call__(
        self, keys_B: Array, proposal: Proposal, logits_BMV: Array, rows: RowParams
    ) -> Verdict:
        target_probs_BMV = sampling.to_probs(logits_BMV, rows)
        if not self.lossless:
            greedy = rows.temperature == 0
            target_probs_BMV = relax_greedy(
                target_probs_BMV, logits_BMV, proposal.tokens, greedy, self.lenience
            )
        return self.verify(keys_B, proposal, target_probs_BMV)

    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        return rejection(keys_B, proposal, target_probs_BMV, self.lenience)

    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        numerator, denominator = ratio(
            proposal.tokens, proposal.probs, target_probs_BMV[:, :-1], self.lenience
        )
        below = numerator < denominator
        accept = jnp.where(below, numerator / jnp.where(below, denominator, 1), numerator > 0)
        return jnp.cumprod(accept, axis=1)


def ratio(
    draft_tokens: Array, draft_probs: Array | None, target_probs: Array, lenience: float = 1.0
) -> tuple[Array, Array]:
    """Returns numerator and denominator of the acceptance probability, at the draft tokens.

    Tokens are [...] and distributions [..., V]; both results are [...]. A token is accepted if
    `u * denominator < numerator`. The comparison needs no division, and at u = 0 it does not accept
    a token of target probability 0. `draft_probs` None: point masses.
    """
    index = jnp.maximum(draft_tokens, 0)[..., None]
    target_at = jnp.take_along_axis(target_probs, index, axis=-1)[..., 0]
    if draft_probs is None:
        draft_at = jnp.ones_like(target_at)
    else:
        draft_at = jnp.take_along_axis(draft_probs, index, axis=-1)[..., 0]
    return jnp.where(draft_tokens >= 0, target_at, 0), lenience * draft_at


def residual(draft_probs: Array, target_probs: Array, lenience: float = 1.0) -> Array:
    """Returns the unnormalised max(target - lenience draft, 0): [..., V], [..., V] -> [..., V].

    Where this is 0, target and draft agree to rounding, and the function returns the target. A
    rejection there has a probability of the order of the rounding error. NaN in either argument
    gives NaN.
    """
    difference = jnp.maximum(target_probs - lenience * draft_probs, 0)
    is_empty = jnp.sum(difference, axis=-1, keepdims=True) == 0
    return jnp.where(is_empty, target_probs, difference)


def rejection(
    keys_B: Array, proposal: Proposal, target_probs_BMV: Array, lenience: float = 1.0
) -> Verdict:
    """Returns the verdict of Chen's modified rejection sampling on a chain.

    Lossless at `lenience=1`; lossy below it.

    Args:
        keys_B: one key per row and round.
        proposal: K draft tokens per row.
        target_probs_BMV: distribution of the target at every node [B, K+1, V].
        lenience: number in (0, 1].
    """
    K = proposal.tokens.shape[1]
    numerator, denominator = ratio(
        proposal.tokens, proposal.probs, target_probs_BMV[:, :K], lenience
    )
    accepted = sampling.uniforms(keys_B, sampling.ACCEPT, K) * denominator < numerator
    count_B = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1, dtype=jnp.int32)
    return accept_first(keys_B, proposal, target_probs_BMV, count_B, lenience)


def accept_first(
    keys_B: Array,
    proposal: Proposal,
    target_probs_BMV: Array,
    count_B: Array,
    lenience: float = 1.0,
) -> Verdict:
    """Returns the verdict that accepts exactly the first `count_B` tokens of a chain."""
    tokens, (M, V) = proposal.tokens, target_probs_BMV.shape[1:]
    # The rejected token, and the distribution that it was drawn from. Where no token was proposed,
    # the draft is zeros: then the residual is the target, and the token drawn is the bonus token.
    padded = jnp.pad(tokens, [(0, 0), (0, 1)], constant_values=-1)
    rejected = jnp.take_along_axis(padded, count_B[:, None], axis=1)
    if proposal.probs is None or M == 1:
        draft_at = (jnp.arange(V) == rejected).astype(target_probs_BMV.dtype)
    else:
        node = jnp.minimum(count_B, M - 2)[:, None, None]
        draft_at = jnp.take_along_axis(proposal.probs, node, axis=1)[:, 0]
        draft_at = jnp.where(rejected >= 0, draft_at, 0)
    target_at = jnp.take_along_axis(target_probs_BMV, count_B[:, None, None], axis=1)[:, 0]
    next_probs = residual(draft_at, target_at, lenience)
    return verdicts.conclude(keys_B, tokens, verdicts.chain_path(count_B, M - 1), next_probs)


def relax_greedy(
    target_probs_BMV: Array,
    logits_BMV: Array,
    draft_tokens_BN: Array,
    greedy_B: Array,
    lenience: float,
) -> Array:
    """Applies lenience to greedy rows: [B, K+1, V] -> [B, K+1, V]. Lossy.

    A greedy target is one-hot, so lenience compares probabilities before the argmax: a draft token
    gets probability 1 if its softmax probability is at least `lenience` times the highest one
    (Leviathan et al. 2022, appendix A.5).
    """
    index = jnp.maximum(draft_tokens_BN, 0)[..., None]
    drafted = jnp.take_along_axis(logits_BMV[:, :-1], index, axis=-1)
    close = drafted >= jnp.max(logits_BMV[:, :-1], axis=-1, keepdims=True) + jnp.log(lenience)
    chosen = jnp.arange(logits_BMV.shape[-1]) == draft_tokens_BN[..., None]
    # Non-finite distributions stay as they are, so that the row is reported.
    chosen &= jnp.isfinite(target_probs_BMV[:, :-1])
    relaxed = jnp.where(chosen & close & greedy_B[:, None, None], 1.0, target_probs_BMV[:, :-1])
    return jnp.concatenate([relaxed, target_probs_BMV[:, -1:]], axis=1)


def check_lenience(lenience: float) -> None:
    """Raises InputError unless 0 < lenience <= 1."""
    least = np.finfo(np.float32).tiny  # lower numbers are flushed to 0
    number = isinstance(lenience, (int, float, np.floating)) and not isinstance(lenience, bool)
    if not number or not least <= lenience <= 1:
        raise InputError(f"lenience: expected a number in (0, 1], found {short_repr(lenience)}")
