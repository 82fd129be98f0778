"""Block verification of a chain (Sun et al. 2024, arXiv 2403.10444).

**Lossless.** The rule looks at a draft as a whole: of the prefixes that pass their tests, the
longest one is accepted. In expectation it accepts at least as many tokens as any lossless rule
that decides token by token (Theorem 2), and as many for point masses, hence for greedy rows.
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import base, rejection, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Accepts the longest prefix of a draft whose test passes. Lossless."""

    lossless = True

    def verify(self, keys_B, proposal, target_probs):
        return block(keys_B, proposal, target_probs)

    def accept_probs(self, proposal, target_probs):
        passed, needed, _ = tests(proposal, target_probs)
        fails = 1 - passed[:, 1:] / jnp.where(needed == 0, 1, needed)[:, 1:]
        return 1 - jnp.cumprod(fails[:, ::-1], axis=1)[:, ::-1]  # a longer prefix will do


def block(keys_B: Array, proposal: Proposal, target_probs: Array) -> Verdict:
    """Returns the verdict of block verification on a chain (Algorithm 2). Lossless.

    Args:
        keys_B: one key per row and round.
        proposal: K draft tokens per row.
        target_probs: [B, K+1, V], the distribution that should have been sampled at each node.
    """
    passed, needed, left = tests(proposal, target_probs)
    M = target_probs.shape[1]
    accepted = sampling.uniforms(keys_B, sampling.ACCEPT, M - 1) * needed[:, 1:] < passed[:, 1:]
    count = jnp.max(jnp.where(accepted, jnp.arange(1, M), 0), axis=1, initial=0)
    left = jnp.take_along_axis(left, count[:, None, None], axis=1)[:, 0]
    # A prefix that cannot be tested might have been the longest.
    testable = jnp.all(jnp.isfinite(passed), axis=1)
    left = jnp.where(testable[:, None], left, jnp.nan)
    return verdicts.conclude(keys_B, proposal.tokens, verdicts.chain_path(count, M - 1), left)


def tests(proposal: Proposal, target_probs: Array) -> tuple[Array, Array, Array]:
    """Returns numerator and denominator of each prefix's chance to pass, and what is left after it.

    What is left is max(w target - draft, 0) for the prefix's weight w, not normalised:
    [B, K+1], [B, K+1], [B, K+1, V].
    """
    tokens, (_, M, V) = proposal.tokens, target_probs.shape
    K = M - 1
    # What follows the last draft token was drawn from nothing, as if from a draft of zeros.
    if proposal.probs is None:
        draft_probs = (tokens[..., None] == jnp.arange(V)).astype(target_probs.dtype)
    else:
        draft_probs = jnp.where(tokens[..., None] >= 0, proposal.probs, 0)
    draft_probs = jnp.pad(draft_probs, [(0, 0), (0, 1), (0, 0)])
    weights = prefix_weights(*rejection.ratio(tokens, proposal.probs, target_probs[:, :K]))
    left = jnp.maximum(weights[..., None] * target_probs - draft_probs, 0)
    mass = jnp.sum(left, axis=-1)
    passed, needed = acceptance(weights, mass)
    # Nothing is left where the two agree to rounding, as in `rejection.residual`.
    left = jnp.where(mass[..., None] == 0, target_probs, left)
    # A prefix of weight 0 is never accepted, whatever follows it.
    passed = jnp.where(weights == 0, 0, passed)
    return passed, jnp.where(weights == 0, 1, needed), left


def prefix_weights(numerator: Array, denominator: Array) -> Array:
    """Returns [B, K+1]: w_0 = 1 and w_i = min(1, w_{i-1} target / draft), of [B, K] each."""
    weights = [jnp.ones(numerator.shape[0], numerator.dtype)]
    for target_at, draft_at in zip(numerator.T, denominator.T):
        scaled = weights[-1] * target_at
        below = scaled < draft_at
        weights.append(jnp.where(below, scaled / draft_at, (scaled > 0).astype(scaled.dtype)))
    return jnp.stack(weights, axis=1)


def acceptance(weights: Array, mass: Array) -> tuple[Array, Array]:
    """Returns numerator and denominator of the probability that a prefix passes its test.

    `mass` is the sum of max(w target - draft, 0) after the prefix: [B, K+1], [B, K+1] -> the same.
    """
    return mass, mass + (1 - weights)
