"""Objectives of language-model training and of draft distillation.

Every function takes logits and returns one value per position, in nats (a probability for
`acceptance` and `total_variation`). The caller masks and averages the values. Log probabilities are
valid logits, too.

`forward_kl`, `reverse_kl`, `jensen_shannon` and `total_variation` are DistillSpec's (Zhou et al.
2023, arXiv 2310.08461, section 3 and appendix A.1). `negative_log_acceptance` and `lk_hybrid` are
by Samarin et al. 2026 (arXiv 2602.23881), `mixed` that of SPiRE.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.errors import InputError, short_repr
from spsjax.types import Array

_LK_DECAY = 3.0  # how fast `lk_hybrid` turns from KL to total variation (Samarin et al. 2026)
_LEAST_REST = 2.0**-24  # distance from 1 to the next smaller float32


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Returns -log softmax(logits)[labels]: [..., V], [...] int -> [...]."""
    return -jnp.take_along_axis(_log_probs(logits), labels[..., None], axis=-1)[..., 0]


def forward_kl(target_logits: Array, draft_logits: Array) -> Array:
    """Returns KL(target || draft): [..., V], [..., V] -> [...].

    This is the usual distillation objective.
    """
    return _kl(_log_probs(target_logits), _log_probs(draft_logits))


def reverse_kl(target_logits: Array, draft_logits: Array) -> Array:
    """Returns KL(draft || target): [..., V], [..., V] -> [...].

    It lets the draft ignore modes of the target that it cannot fit.
    """
    return _kl(_log_probs(draft_logits), _log_probs(target_logits))


def jensen_shannon(target_logits: Array, draft_logits: Array, beta: float = 0.5) -> Array:
    """Returns beta KL(target || m) + (1 - beta) KL(draft || m): [..., V], [..., V] -> [...].

    Here m = beta target + (1 - beta) draft and 0 < beta < 1. Divided by beta, it tends to the
    forward KL as beta goes to 0. Divided by 1 - beta, it tends to the reverse KL as beta goes to 1.
    """
    target, draft = _log_probs(target_logits), _log_probs(draft_logits)
    mixture = jnp.logaddexp(target + jnp.log(beta), draft + jnp.log1p(-beta))
    return beta * _kl(target, mixture) + (1 - beta) * _kl(draft, mixture)


def acceptance(target_logits: Array, draft_logits: Array) -> Array:
    """Returns the probability that a token drawn from the draft is accepted.

    It is the sum of min(target, draft) over the vocabulary: [..., V], [..., V] -> [...]. Leviathan
    et al. 2022 (arXiv 2211.17192), corollary 3.6, at temperature 1.
    """
    target, draft = _log_probs(target_logits), _log_probs(draft_logits)
    return jnp.sum(jnp.exp(jnp.minimum(target, draft)), axis=-1)


def total_variation(target_logits: Array, draft_logits: Array) -> Array:
    """Returns 1 - `acceptance`, the rejection probability: [..., V], [..., V] -> [...]."""
    return 1.0 - acceptance(target_logits, draft_logits)


def negative_log_acceptance(target_logits: Array, draft_logits: Array) -> Array:
    """Returns -log `acceptance`: [..., V], [..., V] -> [...].

    Its gradient is that of total variation divided by the acceptance, so that it does not vanish
    where the two distributions hardly overlap. If the target is a point mass, it equals the cross
    entropy (Samarin et al. 2026).
    """
    target, draft = _log_probs(target_logits), _log_probs(draft_logits)
    return -jax.nn.logsumexp(jnp.minimum(target, draft), axis=-1)


def lk_hybrid(target_logits: Array, draft_logits: Array) -> Array:
    """Returns a mixture of forward KL and total variation: [..., V], [..., V] -> [...].

    It is `w KL + (1 - w) TV` with `w = exp(-3 acceptance)` and no gradient through w. The KL
    dominates while the acceptance is low, because the gradient of total variation vanishes where
    the two distributions hardly overlap (Samarin et al. 2026).
    """
    overlap = acceptance(target_logits, draft_logits)
    weight = lax.stop_gradient(jnp.exp(-_LK_DECAY * overlap))
    kl = forward_kl(target_logits, draft_logits)
    return weight * kl + (1.0 - weight) * (1.0 - overlap)


def mixed(target_logits: Array, draft_logits: Array, beta: float = 0.5) -> Array:
    """Returns beta KL(target || draft) + (1 - beta) TV: [..., V], [..., V] -> [...].

    With 0 < beta < 1; at 0.5 it has the gradient of SPiRE's loss (Neelam et al. 2025, arXiv
    2504.06419), half the cross entropy less half the acceptance.
    """
    kl = forward_kl(target_logits, draft_logits)
    return beta * kl + (1 - beta) * total_variation(target_logits, draft_logits)


def best_token(target_logits: Array, draft_logits: Array) -> Array:
    """Returns the cross entropy of the target's most probable token: [..., V], [..., V] -> [...].

    It is not a divergence: a draft that equals the target does not minimise it.
    """
    return cross_entropy(draft_logits, jnp.argmax(target_logits, axis=-1))


def pace(confidences: Array, counts: Array, share: float) -> Array:
    """Returns the weights of D-PACE for the tokens of drafts: [..., K], [..., K] -> [..., K].

    Token j weighs as much as the expected number of accepted tokens that need it: the sum over
    m >= j of the probability that tokens 1 to m are accepted, where a token is accepted with
    probability `(1 - share) confidence + share` (Wu et al. 2026, arXiv 2605.18810, equations 7
    and 8). No gradient flows through the weights.

    Args:
        confidences: draft's probabilities of the target's tokens.
        counts: 1 for tokens that count, else 0. The others are passed over, and weigh 0.
        share: smoothing, in (0, 1], which keeps later tokens alive. At 1 all tokens before count
            as accepted.
    """
    accepted = jnp.where(counts > 0, (1 - share) * confidences + share, 1)
    prefixes = jnp.cumprod(accepted, axis=-1) * counts
    return lax.stop_gradient(counts * lax.cumsum(prefixes, prefixes.ndim - 1, reverse=True))


# The divergences that `Objective.name` can select.
DIVERGENCES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
    "mixed": mixed,
}
_WITH_BETA = "jensen_shannon", "mixed"


def divergence(
    name: str, key: str = "divergence", other: str = ""
) -> Callable[[Array, Array], Array]:
    """Returns a divergence by name; "jensen_shannon:0.1" and "mixed:0.1" also set beta.

    The error message names the config's key, and another name that the key may have. Raises
    InputError if there is no divergence of this name.
    """
    base, colon, beta = str(name).partition(":")
    if base not in DIVERGENCES or (colon and base not in _WITH_BETA):
        raise InputError(
            f"{key}: expected {other and other + ' or '}one of {', '.join(DIVERGENCES)}, "
            f"found {short_repr(name)}"
        )
    if not colon:
        return DIVERGENCES[base]
    try:
        if not 1e-6 <= float(beta) <= 1 - 1e-6:  # closer values may round to 0 or 1 in float32
            raise ValueError
    except ValueError:
        raise InputError(
            f"{key}: expected beta in [1e-6, 1 - 1e-6], found {short_repr(name)}"
        ) from None
    return functools.partial(DIVERGENCES[base], beta=float(beta))


def top_k_with_rest(logits: Array, ids: Array) -> Array:
    """Returns log probabilities of the tokens `ids`, then of all other tokens together.

    [..., V], [..., k] int -> [..., k + 1]. It serves to distil from a target of which only the most
    likely tokens were cached. By the data-processing inequality, the divergence of two results is
    at most that of the full distributions, and their acceptance is at least the full acceptance.
    """
    log_probs = jnp.take_along_axis(_log_probs(logits), ids, axis=-1)
    return jnp.concatenate([log_probs, _log_rest(log_probs)], axis=-1)


def _log_rest(log_probs: Array) -> Array:
    """Returns log(1 - sum of probabilities) over the last axis, which is kept: [..., 1].

    Rounding may bring the sum to 1 or above, so that the rest is at least `_LEAST_REST`.
    """
    total = jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
    return jnp.log(jnp.maximum(1.0 - total, _LEAST_REST))


def _log_probs(logits: Array) -> Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def _kl(log_probs: Array, others: Array) -> Array:
    """Returns KL(log_probs || others).

    Tokens of probability 0 add nothing, although their log probability may be infinite.
    """
    probs = jnp.exp(log_probs)
    difference = jnp.where(probs > 0, log_probs - others, 0.0)
    return jnp.sum(probs * difference, axis=-1)
