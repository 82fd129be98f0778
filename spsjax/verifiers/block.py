"""Block verification of a chain (Sun et al. 2024, arXiv 2403.10444).

**Lossless.** The rule tests every prefix of a draft as a whole, and accepts the longest prefix that
passes. The expected number of accepted tokens is at least that of any lossless rule that decides
token by token (Theorem 2). For point masses, and so in greedy rows, it is the same.
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import base, rejection, verdicts


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Accepts the longest prefix of a draft that passes its test. Lossless."""

    lossless = True

    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        return block(keys_B, proposal, target_probs_BMV)

    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        numerator, denominator, _ = tests(proposal, target_probs_BMV)
        fails = 1 - numerator[:, 1:] / jnp.where(denominator == 0, 1, denominator)[:, 1:]
        # Token k is accepted unless the prefixes of k or more tokens all fail.
        return 1 - jnp.cumprod(fails[:, ::-1], axis=1)[:, ::-1]


def block(keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
    """Returns the verdict of block verification on a chain (Algorithm 2). Lossless.

    Args:
        keys_B: one key per row and round.
        proposal: K draft tokens per row.
        target_probs_BMV: distribution of the target at every node [B, K+1, V].
    """
    numerator, denominator, residuals_BMV = tests(proposal, target_probs_BMV)
    M = target_probs_BMV.shape[1]
    uniforms = sampling.uniforms(keys_B, sampling.ACCEPT, M - 1)
    passes = uniforms * denominator[:, 1:] < numerator[:, 1:]
    count = jnp.max(jnp.where(passes, jnp.arange(1, M), 0), axis=1, initial=0)
    next_probs = jnp.take_along_axis(residuals_BMV, count[:, None, None], axis=1)[:, 0]
    # A prefix that cannot be tested might have been the longest, so the row is reported.
    testable = jnp.all(jnp.isfinite(numerator), axis=1)
    next_probs = jnp.where(testable[:, None], next_probs, jnp.nan)
    path = verdicts.chain_path(count, M - 1)
    return verdicts.conclude(keys_B, proposal.tokens, path, next_probs)


def tests(proposal: Proposal, target_probs_BMV: Array) -> tuple[Array, Array, Array]:
    """Returns the test of each prefix, and the residual distribution after it.

    A test is the numerator and the denominator [B, K+1] of the probability to pass. The residual is
    max(w target - draft, 0) [B, K+1, V] for the prefix's weight w, not normalised.
    """
    tokens, (_, M, V) = proposal.tokens, target_probs_BMV.shape
    K = M - 1
    # No token was drafted after the last one. A draft of zeros makes its residual the target's
    # distribution, from which the bonus token is drawn.
    if proposal.probs is None:
        draft_probs = (tokens[..., None] == jnp.arange(V)).astype(target_probs_BMV.dtype)
    else:
        draft_probs = jnp.where(tokens[..., None] >= 0, proposal.probs, 0)
    draft_probs = jnp.pad(draft_probs, [(0, 0), (0, 1), (0, 0)])
    weights = prefix_weights(*rejection.ratio(tokens, proposal.probs, target_probs_BMV[:, :K]))
    residual = jnp.maximum(weights[..., None] * target_probs_BMV - draft_probs, 0)
    mass = jnp.sum(residual, axis=-1)
    numerator, denominator = acceptance(weights, mass)
    # The residual is 0 where target and draft agree to rounding (see `rejection.residual`).
    residual = jnp.where(mass[..., None] == 0, target_probs_BMV, residual)
    # A prefix of weight 0 is never accepted: it contains a token that the target cannot emit.
    numerator = jnp.where(weights == 0, 0, numerator)
    return numerator, jnp.where(weights == 0, 1, denominator), residual


def prefix_weights(numerator_BK: Array, denominator_BK: Array) -> Array:
    """Returns the weights w_0 = 1, w_i = min(1, w_{i-1} target / draft): 2 x [B, K] -> [B, K+1]."""
    weights = [jnp.ones(numerator_BK.shape[0], numerator_BK.dtype)]
    for target_at, draft_at in zip(numerator_BK.T, denominator_BK.T):
        scaled = weights[-1] * target_at
        below = scaled < draft_at
        weights.append(jnp.where(below, scaled / draft_at, (scaled > 0).astype(scaled.dtype)))
    return jnp.stack(weights, axis=1)


def acceptance(weights_BM: Array, mass_BM: Array) -> tuple[Array, Array]:
    """Returns numerator and denominator of the probability that a prefix passes.

    `mass_BM` is the sum of max(w target - draft, 0) after the prefix. All arrays are [B, K+1].
    """
    return mass_BM, mass_BM + (1 - weights_BM)
