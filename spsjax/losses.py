"""Objectives of language-model training and of draft distillation.

Every function takes logits and returns one value a position, in nats (a probability for
`acceptance` and `total_variation`), so that a caller can mask and average as it likes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.types import Array


def cross_entropy(logits: Array, labels: Array) -> Array:
    """-log softmax(logits)[labels]: [..., V], [...] int -> [...]."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]


def forward_kl(target_logits: Array, draft_logits: Array) -> Array:
    """KL(target || draft): [..., V], [..., V] -> [...]. The usual distillation objective."""
    target = jax.nn.log_softmax(target_logits.astype(jnp.float32))
    draft = jax.nn.log_softmax(draft_logits.astype(jnp.float32))
    return jnp.sum(jnp.exp(target) * (target - draft), axis=-1)


def acceptance(target_logits: Array, draft_logits: Array) -> Array:
    """Probability that a token drawn from the draft is accepted: sum of min(target, draft).

    Leviathan et al. 2022 (arXiv 2211.17192), corollary 3.6, at temperature 1.
    """
    target = jax.nn.softmax(target_logits.astype(jnp.float32))
    draft = jax.nn.softmax(draft_logits.astype(jnp.float32))
    return jnp.sum(jnp.minimum(target, draft), axis=-1)


def total_variation(target_logits: Array, draft_logits: Array) -> Array:
    """1 - `acceptance` (Zhou et al. 2023, DistillSpec, arXiv 2310.08461)."""
    return 1.0 - acceptance(target_logits, draft_logits)


def lk_hybrid(target_logits: Array, draft_logits: Array) -> Array:
    """Forward KL while acceptance is low, total variation as it rises.

    `w KL + (1 - w) TV` with `w = exp(-3 acceptance)` and no gradient through w: the gradient of
    total variation alone vanishes where the two hardly overlap (Samarin et al. 2026, arXiv
    2602.23881).
    """
    overlap = acceptance(target_logits, draft_logits)
    weight = lax.stop_gradient(jnp.exp(-3.0 * overlap))
    kl = forward_kl(target_logits, draft_logits)
    return weight * kl + (1.0 - weight) * (1.0 - overlap)


# What a draft can be distilled with.
DIVERGENCES = {
    "forward_kl": forward_kl,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
}
