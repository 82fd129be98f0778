"""Objectives of language-model training and of draft distillation.

Every function takes logits and returns one value a position, in nats (a probability for
`acceptance` and `total_variation`), so that a caller can mask and average as it likes. Log
probabilities are logits, too.

The divergences are those of DistillSpec (Zhou et al. 2023, arXiv 2310.08461, section 3 and appendix
A.1), the last two those of Samarin et al. 2026 (arXiv 2602.23881).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.errors import InputError, short_repr
from spsjax.types import Array


def cross_entropy(logits: Array, labels: Array) -> Array:
    """-log softmax(logits)[labels]: [..., V], [...] int -> [...]."""
    return -jnp.take_along_axis(_log_probs(logits), labels[..., None], axis=-1)[..., 0]


def forward_kl(target_logits: Array, draft_logits: Array) -> Array:
    """KL(target || draft): [..., V], [..., V] -> [...]. The usual distillation objective."""
    return _kl(_log_probs(target_logits), _log_probs(draft_logits))


def reverse_kl(target_logits: Array, draft_logits: Array) -> Array:
    """KL(draft || target): [..., V], [..., V] -> [...]. The draft leaves out what it cannot fit."""
    return _kl(_log_probs(draft_logits), _log_probs(target_logits))


def jensen_shannon(target_logits: Array, draft_logits: Array, beta: float = 0.5) -> Array:
    """beta KL(target || m) + (1 - beta) KL(draft || m), with m = beta target + (1 - beta) draft.

    [..., V], [..., V] -> [...]; 0 < beta < 1. Over beta it tends to the forward KL as beta goes to
    0, over 1 - beta to the reverse KL as it goes to 1.
    """
    target, draft = _log_probs(target_logits), _log_probs(draft_logits)
    mixture = jnp.logaddexp(target + jnp.log(beta), draft + jnp.log1p(-beta))
    return beta * _kl(target, mixture) + (1 - beta) * _kl(draft, mixture)


def acceptance(target_logits: Array, draft_logits: Array) -> Array:
    """Probability that a token drawn from the draft is accepted: sum of min(target, draft).

    Leviathan et al. 2022 (arXiv 2211.17192), corollary 3.6, at temperature 1.
    """
    target, draft = _log_probs(target_logits), _log_probs(draft_logits)
    return jnp.sum(jnp.exp(jnp.minimum(target, draft)), axis=-1)


def total_variation(target_logits: Array, draft_logits: Array) -> Array:
    """1 - `acceptance`: what is rejected of the draft's tokens."""
    return 1.0 - acceptance(target_logits, draft_logits)


def negative_log_acceptance(target_logits: Array, draft_logits: Array) -> Array:
    """-log `acceptance`: the gradient of total variation, over the acceptance.

    It does not vanish where the two hardly overlap; with a point mass as the target it is the cross
    entropy (Samarin et al. 2026).
    """
    target, draft = _log_probs(target_logits), _log_probs(draft_logits)
    return -jax.nn.logsumexp(jnp.minimum(target, draft), axis=-1)


def lk_hybrid(target_logits: Array, draft_logits: Array) -> Array:
    """Forward KL while acceptance is low, total variation as it rises.

    `w KL + (1 - w) TV` with `w = exp(-3 acceptance)` and no gradient through w: the gradient of
    total variation alone vanishes where the two hardly overlap (Samarin et al. 2026).
    """
    overlap = acceptance(target_logits, draft_logits)
    weight = lax.stop_gradient(jnp.exp(-3.0 * overlap))
    kl = forward_kl(target_logits, draft_logits)
    return weight * kl + (1.0 - weight) * (1.0 - overlap)


# What a draft can be distilled with.
DIVERGENCES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}


def divergence(name: str) -> Callable[[Array, Array], Array]:
    """The divergence of that name; "jensen_shannon:0.1" says beta.

    Raises InputError for any other.
    """
    base, colon, beta = str(name).partition(":")
    if base not in DIVERGENCES or (colon and base != "jensen_shannon"):
        raise InputError(
            f"objective: expected cross_entropy or one of {', '.join(DIVERGENCES)}, "
            f"found {short_repr(name)}"
        )
    if not colon:
        return DIVERGENCES[base]
    try:
        if not 1e-6 <= float(beta) <= 1 - 1e-6:  # others are 0 or 1 in float32
            raise ValueError
    except ValueError:
        raise InputError(
            f"objective: expected beta in [1e-6, 1 - 1e-6], found {short_repr(name)}"
        ) from None
    return functools.partial(jensen_shannon, beta=float(beta))


def coarse(logits: Array, ids: Array) -> Array:
    """The law over the tokens `ids` and the rest as one, as log probabilities.

    [..., V], [..., k] int -> [..., k + 1]. A divergence between two laws seen so is at most that
    between the whole ones, and an acceptance is at least theirs (the data-processing inequality).
    That is how to distil from a target of which only the likeliest tokens were kept.
    """
    kept = jnp.take_along_axis(_log_probs(logits), ids, axis=-1)
    return jnp.concatenate([kept, _log_rest(kept)], axis=-1)


def _log_rest(log_probs: Array) -> Array:
    """log(1 - sum exp), at least that of the least 32-bit step below 1; the last axis stays."""
    total = jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
    return jnp.log(jnp.maximum(1.0 - total, 2.0**-24))


def _log_probs(logits: Array) -> Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def _kl(log_probs: Array, others: Array) -> Array:
    """KL of the first from the second; a token of probability 0 adds nothing."""
    probs = jnp.exp(log_probs)
    difference = jnp.where(probs > 0, log_probs - others, 0.0)
    return jnp.sum(probs * difference, axis=-1)
