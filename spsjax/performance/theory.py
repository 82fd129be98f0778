"""What speculative sampling can be expected to give, in closed form.

An acceptance rate is one number, where every draft token is as likely to be accepted as any other;
or a sequence, of which the i-th is the chance of the i-th draft token of a round if it is reached,
as `summary.acceptance_by_position` measures it. Costs are in passes of the target over one token.

Leviathan et al. 2022 (arXiv 2211.17192), sections 3.1 to 3.5; Chen et al. 2023 (arXiv 2302.01318).
"""

from collections.abc import Callable, Sequence

import numpy as np

from spsjax.errors import InputError, short_repr


def acceptance(target_probs, draft_probs, lenience: float = 1.0):
    """Chance that a token drawn from the draft is accepted: [..., V] x2 -> [...].

    sum min(target / lenience, draft): `D_LK` of Leviathan et al., definition 3.3, is 1 minus it,
    and so is the total variation of the two, at lenience 1.
    """
    return np.sum(np.minimum(np.asarray(target_probs) / lenience, draft_probs), axis=-1)


def match(target_probs, draft_probs):
    """Chance that a token of the draft is what the target would have drawn: [..., V] x2 -> [...].

    sum target x draft: what accepting by comparison, instead of by rejection sampling, gives. It is
    never more than `acceptance`, because a product of probabilities is at most the lesser of them.
    """
    return np.sum(np.asarray(target_probs) * draft_probs, axis=-1)


def block_efficiency(acceptance: float | Sequence[float], num_speculative_tokens: int) -> float:
    """Tokens a target call, the target's own one included: equation 1 if all rates are the same."""
    rates = _rates(acceptance, num_speculative_tokens)
    return float(1 + np.sum(np.cumprod(rates)))


def speedup(
    acceptance: float | Sequence[float],
    num_speculative_tokens: int,
    draft_cost: float,
    scoring_cost: float = 1.0,
) -> float:
    """Over autoregressive sampling, in wall time: theorem 3.8.

    Args:
        acceptance: rate, or rates by position.
        num_speculative_tokens: K.
        draft_cost: of a draft step (c).
        scoring_cost: of the pass over K + 1 tokens; 1 where it is bound by the weights' bytes.
    """
    tokens = block_efficiency(acceptance, num_speculative_tokens)
    return tokens / (num_speculative_tokens * draft_cost + scoring_cost)


def operations(
    acceptance: float | Sequence[float], num_speculative_tokens: int, draft_operations: float
) -> float:
    """Arithmetic a token, as a multiple of autoregressive sampling's: theorem 3.11.

    `draft_operations` are those of a draft token over those of a target's.
    """
    K = num_speculative_tokens
    return (K * draft_operations + K + 1) / block_efficiency(acceptance, K)


def best(
    acceptance: float | Sequence[float],
    draft_cost: float | Callable[[int], float],
    scoring_cost: float | Callable[[int], float] = 1.0,
    most: int = 256,
) -> tuple[int, float]:
    """The K of at most `most` that is fastest, and its speed-up; (0, 1) where none is above 1.

    Costs are as in `speedup`: numbers, or functions of K.
    """
    counts = range(1, min(most, len(acceptance)) + 1 if np.ndim(acceptance) else most + 1)
    costs = {
        K: [cost(K) if callable(cost) else cost for cost in (draft_cost, scoring_cost)]
        for K in counts
    }
    speeds = {K: speedup(acceptance, K, *costs[K]) for K in counts}
    fastest = max(speeds, key=speeds.get, default=0)
    return (fastest, speeds[fastest]) if speeds.get(fastest, 0) > 1 else (0, 1.0)


def rate_of(block_efficiency: float, num_speculative_tokens: int) -> float:
    """The one acceptance rate that gives so many tokens a call; the inverse of equation 1."""
    K = num_speculative_tokens
    if not 1 <= block_efficiency <= K + 1:
        raise InputError(
            f"block_efficiency: expected a number in [1, {K + 1}], "
            f"found {short_repr(block_efficiency)}"
        )
    # sum of rate^i - tokens = 0 has one root in [0, 1], as the sum grows with the rate.
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        small = np.sum(middle ** np.arange(K + 1)) < block_efficiency
        low, high = (middle, high) if small else (low, middle)
    return (low + high) / 2


def _rates(acceptance, num_speculative_tokens: int) -> np.ndarray:
    rates = np.asarray(acceptance, float)
    if rates.ndim == 0:
        rates = np.full(num_speculative_tokens, rates)
    if len(rates) < num_speculative_tokens:
        raise InputError(
            f"acceptance: expected {num_speculative_tokens} rates, one a position, "
            f"found {len(rates)}"
        )
    rates = rates[:num_speculative_tokens]
    if not np.all((rates >= 0) & (rates <= 1)):
        raise InputError(f"acceptance: expected numbers in [0, 1], found {short_repr(acceptance)}")
    return rates
