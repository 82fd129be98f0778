"""Deliberately broken verifiers, which the tests of exactness must reject.

One rejection sampler with a switch for each fault. Without a fault it is correct, and passes.
"""

import jax
import jax.numpy as jnp

from spsjax import sampling
from spsjax.types import Verdict

# Faults that change the law of a single round, and so are seen by enumeration.
LAW = (
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
    "goes on after a rejection",
)


def verifier(fault: str | None):
    """`verify.rejection` with one fault. For proposals with distributions, and no ids of -1."""

    def rejection(keys_B, proposal, target_probs, lenience=1.0):
        tokens, draft_probs = proposal.tokens, proposal.probs
        B, K = tokens.shape

        def at_tokens(probs):
            return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]

        target_at, draft_at = at_tokens(target_probs[:, :K]), at_tokens(draft_probs)
        if fault == "draft of another temperature in the ratio":
            cooled = draft_probs**1.1
            draft_at = at_tokens(cooled / jnp.sum(cooled, axis=-1, keepdims=True))
        if fault == "raw target in the ratio":
            raw = jax.nn.softmax(target_probs[:, :K])
            target_at = at_tokens(raw)
        if fault == "swapped target and draft":
            target_at, draft_at = draft_at, target_at
        if fault == "epsilon in the ratio":
            draft_at = draft_at + 1e-9
        uniform = sampling.uniforms(keys_B, sampling.ACCEPT, K)
        if fault == "u = 0 accepts anything":
            accepted = uniform * draft_at <= target_at
        else:
            accepted = uniform * draft_at < target_at
        if fault == "accepts everything":
            accepted = jnp.ones_like(accepted)
        if fault == "goes on after a rejection":
            count = jnp.sum(accepted, axis=1)
        else:
            count = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1)
        after = jnp.zeros_like(draft_probs[:, :1])
        if fault == "bonus from the draft":
            target_probs = target_probs.at[:, K].set(draft_probs[:, K - 1])
        node = count
        if fault == "residual of the next position":
            node = jnp.where(count < K, count + 1, K)
        padded = jnp.concatenate([draft_probs, after], axis=1)
        left = jnp.maximum(target_probs - padded, 0)
        if fault == "residual without the draft":
            left = target_probs
        if fault == "residual by softmax":
            left = jnp.where(
                jnp.any(padded > 0, axis=-1, keepdims=True), jax.nn.softmax(left), left
            )
        left = jnp.where(jnp.any(left > 0, axis=-1, keepdims=True), left, target_probs)
        left = jnp.take_along_axis(left, node[:, None, None], axis=1)[:, 0]
        following = sampling.draw(left, sampling.uniforms(keys_B, sampling.NEXT, 1)[:, 0])
        index = jnp.arange(K + 1)
        emitted = jnp.concatenate([tokens, -jnp.ones((B, 1), jnp.int32)], axis=1)
        emitted = jnp.where(index == count[:, None], following[:, None], emitted)
        number = count + 1
        if fault == "no bonus":
            number = jnp.minimum(number, K)
        emitted = jnp.where(index < number[:, None], emitted, -1)
        return Verdict(emitted, number.astype(jnp.int32), jnp.ones(B, bool))

    return rejection
