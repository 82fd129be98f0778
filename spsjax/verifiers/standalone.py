"""Verification of other people's distributions, with checked inputs."""

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import sampling
from spsjax.errors import InputError
from spsjax.types import Array, Proposal
from spsjax.verifiers import inputs
from spsjax.verifiers.rejection import check_lenience, rejection


def rejection_sample(
    key: Array, draft_tokens: Array, draft_probs: Array, target_probs: Array, lenience: float = 1.0
) -> tuple[Array, Array]:
    """Verifies a chain by modified rejection sampling (Chen et al. 2023, Algorithm 2).

    Lossless at `lenience=1`, if `draft_tokens[:, k]` was drawn from `draft_probs[:, k]`.

    Args:
        key: one key; row b uses `fold_in(key, b)`. A key of another generator than threefry is
            turned into a threefry key first.
        draft_tokens: [B, K] int; -1: nothing is proposed at this position and after it.
        draft_probs: [B, K, V] float, each summing to 1.
        target_probs: [B, K+1, V] float, each summing to 1.
        lenience: number in (0, 1]; acceptance is min(1, target / (lenience draft)), lossy below 1.

    Returns:
        [B, K+1] int32 tokens padded with -1, and [B] int32 their number: 1..K+1, or 0 for a row
        with a probability that is not finite.

    Raises:
        InputError: shapes or types do not fit together, or lenience is outside (0, 1]. Unless
            traced by `jit`, also if ids are outside the vocabulary or if distributions do not sum
            to 1.
    """
    check_lenience(lenience)
    inputs.check_key(key)
    tokens = inputs.as_array("draft_tokens", draft_tokens)
    if tokens.ndim != 2 or not tokens.shape[0] or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(
            f"draft_tokens: expected integers [B, K], B >= 1, found {inputs.describe(tokens)}"
        )
    (B, K), V = tokens.shape, (0, *inputs.as_array("target_probs", target_probs).shape)[-1]
    target_probs = inputs.distributions("target_probs", target_probs, (B, K + 1, V))
    draft_probs = inputs.distributions("draft_probs", draft_probs, (B, K, V), tokens >= 0)
    if not isinstance(tokens, jax.core.Tracer):  # under jit the values are not known
        wrong = np.asarray(tokens)
        wrong = wrong[(wrong < -1) | (wrong >= V)]
        if wrong.size:
            raise InputError(f"draft_tokens: expected ids in [-1, {V}), found {wrong[0]}")
    proposal = Proposal(jnp.asarray(tokens, jnp.int32), draft_probs)
    verdict = rejection(sampling.row_keys(key, B), proposal, target_probs, lenience)
    # The distributions of positions that are not proposed may be anything.
    offered = jnp.cumprod(proposal.tokens >= 0, axis=1).astype(bool)
    used = jnp.concatenate([jnp.ones((B, 1), bool), offered], axis=1)
    finite = jnp.all(jnp.isfinite(jnp.sum(draft_probs, axis=-1)) | ~offered, axis=1)
    finite &= jnp.all(jnp.isfinite(jnp.sum(target_probs, axis=-1)) | ~used, axis=1)
    valid = verdict.valid & finite
    return jnp.where(valid[:, None], verdict.tokens, -1), jnp.where(valid, verdict.num_tokens, 0)
