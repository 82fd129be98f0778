"""Deliberately broken verifiers, which the exactness tests must reject.

They are one rejection sampler with a switch per fault. Without a fault it is correct, and passes.
"""

import jax
import jax.numpy as jnp

from spsjax import sampling
from spsjax.types import Verdict

FAULTS = (
    "none",
    # These change the distribution of a round, which enumeration computes.
    "draft of another temperature in the ratio",
    "raw target in the ratio",
    "swapped target and draft",
    "residual by softmax",
    "residual without the draft",
    "residual of the next position",
    "epsilon in the ratio",
    "bonus from the draft",
    "no bonus",
    "accepts everything",
    "continues after a rejection",
    # This fault shows only at one random number, whose probability in enumeration is zero.
    "u = 0 accepts anything",
)


def verifier(fault):
    """Returns `rejection.rejection` with the fault of an index.

    The index may be traced, so that all faults share one program. Proposals must have
    distributions, and no ids of -1.
    """

    def rejection(keys_B, proposal, target_probs, lenience=1.0):
        tokens, draft_probs = proposal.tokens, proposal.probs
        B, K = tokens.shape

        def faulty(name, broken, sound):
            return jnp.where(fault == FAULTS.index(name), broken, sound)

        def at_tokens(probs):
            return jnp.take_along_axis(probs[:, :K], tokens[..., None], axis=-1)[..., 0]

        target_at, draft_at = at_tokens(target_probs), at_tokens(draft_probs)
        cooled = draft_probs**1.1
        cooled = at_tokens(cooled / jnp.sum(cooled, axis=-1, keepdims=True))
        swap = "swapped target and draft"
        target_at, draft_at = faulty(swap, draft_at, target_at), faulty(swap, target_at, draft_at)
        draft_at = faulty("draft of another temperature in the ratio", cooled, draft_at)
        draft_at = faulty("epsilon in the ratio", draft_at + 1e-9, draft_at)
        target_at = faulty("raw target in the ratio", at_tokens(raw_probs(target_probs)), target_at)
        uniform = sampling.uniforms(keys_B, sampling.ACCEPT, K)
        accepted = uniform * draft_at < target_at
        accepted = faulty("u = 0 accepts anything", uniform * draft_at <= target_at, accepted)
        accepted = faulty("accepts everything", True, accepted)
        count = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1)
        count = faulty("continues after a rejection", jnp.sum(accepted, axis=1), count)
        stolen = target_probs.at[:, K].set(draft_probs[:, K - 1])
        target_probs = faulty("bonus from the draft", stolen, target_probs)
        none = jnp.zeros_like(draft_probs[:, :1])
        left = jnp.maximum(target_probs - jnp.concatenate([draft_probs, none], axis=1), 0)
        left = left.at[:, :K].set(faulty("residual by softmax", jax.nn.softmax(left), left)[:, :K])
        left = faulty("residual without the draft", target_probs, left)
        left = jnp.where(jnp.any(left > 0, axis=-1, keepdims=True), left, target_probs)
        node = faulty("residual of the next position", jnp.minimum(count + 1, K), count)
        left = jnp.take_along_axis(left, node[:, None, None], axis=1)[:, 0]
        following = sampling.draw(left, sampling.uniforms(keys_B, sampling.NEXT, 2))
        index = jnp.arange(K + 1)
        emitted = jnp.concatenate([tokens, -jnp.ones((B, 1), jnp.int32)], axis=1)
        emitted = jnp.where(index == count[:, None], following[:, None], emitted)
        number = faulty("no bonus", jnp.minimum(count + 1, K), count + 1)
        emitted = jnp.where(index < number[:, None], emitted, -1).astype(jnp.int32)
        path = jnp.where(index <= count[:, None], index, -1).astype(jnp.int32)
        return Verdict(emitted, number.astype(jnp.int32), path, jnp.ones(B, bool))

    return rejection


def raw_probs(probs):
    """Returns a distribution at twice its temperature."""
    roots = jnp.sqrt(probs)
    return roots / jnp.sum(roots, axis=-1, keepdims=True)
