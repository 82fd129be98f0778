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
from spsjax.types import Array, Proposal, Verdict
from spsjax.utils import traced
from spsjax.verifiers import base, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Accepts draft tokens one by one, each with probability min(1, target / (lenience draft)).

    Lossless at `lenience=1`; lossy below it, by what `spsjax.lenience_bias` says.

    Attributes:
        lenience: number in (0, 1]; below 1, more drafts are accepted.
    """

    lenience: float = traced.number(1.0, off=1.0)

    def __post_init__(self):
        check_lenience(self.lenience)

    @property
    def lossless(self) -> bool:
        # A lenience that is traced is below 1, where it would be static.
        return not isinstance(self.lenience, jax.core.Tracer) and self.lenience == 1

    def __call__(self, keys_B, proposal, logits_BMV, rows):
        target_probs = sampling.to_probs(logits_BMV, rows)
        if not self.lossless:
            greedy = rows.temperature == 0
            target_probs = relax_greedy(
                target_probs, logits_BMV, proposal.tokens, greedy, self.lenience
            )
        return self.verify(keys_B, proposal, target_probs)

    def verify(self, keys_B, proposal, target_probs):
        return rejection(keys_B, proposal, target_probs, self.lenience)

    def accept_probs(self, proposal, target_probs):
        numerator, denominator = ratio(
            proposal.tokens, proposal.probs, target_probs[:, :-1], self.lenience
        )
        below = numerator < denominator
        accept = jnp.where(below, numerator / jnp.where(below, denominator, 1), numerator > 0)
        return jnp.cumprod(accept, axis=1)


def ratio(
    draft_tokens: Array, draft_probs: Array | None, target_probs: Array, lenience: float = 1.0
) -> tuple[Array, Array]:
    """Returns numerator and denominator of the acceptance probability.

    Both are taken at the draft tokens, for tokens [...] and distributions [..., V] -> [...], [...].
    A token is accepted if `u * denominator < numerator`: nothing is divided, and u = 0 never
    accepts a token to which the target gives no probability. `draft_probs` None: point masses.
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

    Where nothing is left (the two agree to rounding) it is the target itself; a rejection there has
    a probability of the order of the rounding. NaN in either argument gives NaN.
    """
    left = jnp.maximum(target_probs - lenience * draft_probs, 0)
    empty = jnp.sum(left, axis=-1, keepdims=True) == 0
    return jnp.where(empty, target_probs, left)


def rejection(
    keys_B: Array, proposal: Proposal, target_probs: Array, lenience: float = 1.0
) -> Verdict:
    """Returns the verdict of Chen's modified rejection sampling on a chain.

    Lossless at `lenience=1`; lossy below it.

    Args:
        keys_B: one key per row and round.
        proposal: K draft tokens per row.
        target_probs: [B, K+1, V], the distribution that should have been sampled at each node.
        lenience: number in (0, 1].
    """
    K = proposal.tokens.shape[1]
    numerator, denominator = ratio(proposal.tokens, proposal.probs, target_probs[:, :K], lenience)
    accepted = sampling.uniforms(keys_B, sampling.ACCEPT, K) * denominator < numerator
    count = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1, dtype=jnp.int32)
    return accept_first(keys_B, proposal, target_probs, count, lenience)


def accept_first(
    keys_B: Array, proposal: Proposal, target_probs: Array, count: Array, lenience: float = 1.0
) -> Verdict:
    """Returns the verdict that accepts the first `count` [B] tokens of a chain, and no more."""
    tokens, (M, V) = proposal.tokens, target_probs.shape[1:]
    # The token that was rejected, and the distribution that it was drawn from. After the last draft
    # token, and where no token was proposed, that is a draft of zeros: the bonus is a residual.
    padded = jnp.pad(tokens, [(0, 0), (0, 1)], constant_values=-1)
    rejected = jnp.take_along_axis(padded, count[:, None], axis=1)
    if proposal.probs is None or M == 1:
        draft_at = (jnp.arange(V) == rejected).astype(target_probs.dtype)
    else:
        node = jnp.minimum(count, M - 2)[:, None, None]
        draft_at = jnp.take_along_axis(proposal.probs, node, axis=1)[:, 0]
        draft_at = jnp.where(rejected >= 0, draft_at, 0)
    target_at = jnp.take_along_axis(target_probs, count[:, None, None], axis=1)[:, 0]
    left = residual(draft_at, target_at, lenience)
    return verdicts.conclude(keys_B, tokens, verdicts.chain_path(count, M - 1), left)


def relax_greedy(
    target_probs: Array, logits: Array, draft_tokens: Array, greedy: Array, lenience: float
) -> Array:
    """Applies lenience to greedy rows, whose one-hot target has no "nearly". Lossy.

    Gives probability 1 to a draft token whose own probability is at least `lenience` times the
    best one's, before standardising (Leviathan et al. 2022, appendix A.5). [B, K+1, V] -> same.
    """
    index = jnp.maximum(draft_tokens, 0)[..., None]
    drafted = jnp.take_along_axis(logits[:, :-1], index, axis=-1)
    close = drafted >= jnp.max(logits[:, :-1], axis=-1, keepdims=True) + jnp.log(lenience)
    chosen = jnp.arange(logits.shape[-1]) == draft_tokens[..., None]
    # Leave non-finite target distributions unchanged, so that they are still reported.
    chosen &= jnp.isfinite(target_probs[:, :-1])
    relaxed = jnp.where(chosen & close & greedy[:, None, None], 1.0, target_probs[:, :-1])
    return jnp.concatenate([relaxed, target_probs[:, -1:]], axis=1)


def check_lenience(lenience: float) -> None:
    """Raises InputError unless 0 < lenience <= 1."""
    least = np.finfo(np.float32).tiny  # below it, arithmetic makes it zero
    number = isinstance(lenience, (int, float, np.floating)) and not isinstance(lenience, bool)
    if not number or not least <= lenience <= 1:
        raise InputError(f"lenience: expected a number in (0, 1], found {short_repr(lenience)}")
