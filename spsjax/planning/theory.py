"""Closed-form predictions for speculative sampling: block efficiency, speed-up and best K.

An acceptance rate is one number, where every draft token is as likely to be accepted as any other;
or a sequence, of which the i-th is the chance of the i-th draft token of a round if it is reached,
as `summary.acceptance_by_position` measures it. Costs are in passes of the target over one token.

Leviathan et al. 2022 (arXiv 2211.17192), sections 3.1 to 3.5; Chen et al. 2023 (arXiv 2302.01318).
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize

from spsjax.errors import InputError, short_repr


def acceptance(target_probs, draft_probs, lenience: float = 1.0):
    """Returns the probability that a token drawn from the draft is accepted: [..., V] x2 -> [...].

    It is sum min(target / lenience, draft), that is 1 - `D_LK` of Leviathan et al., definition 3.3.
    At lenience 1 it is 1 minus the total variation distance.
    """
    return np.sum(np.minimum(np.asarray(target_probs) / lenience, draft_probs), axis=-1)


def block_efficiency(acceptance: float | Sequence[float], num_speculative_tokens: int) -> float:
    """Returns the tokens per target call, the target's own token included (equation 1)."""
    rates = _rates(acceptance, num_speculative_tokens)
    # The i-th term is the probability that the first i draft tokens are all accepted.
    return float(1 + np.sum(np.cumprod(rates)))


def speedup(
    acceptance: float | Sequence[float],
    num_speculative_tokens: int,
    draft_cost: float,
    scoring_cost: float = 1.0,
) -> float:
    """Returns the speed-up over autoregressive sampling in wall time (theorem 3.8).

    `draft_cost` is the cost of one draft step (c in the paper), and `scoring_cost` that of the pass
    over K + 1 tokens. The latter is 1 if reading the weights takes all the time.
    """
    tokens = block_efficiency(acceptance, num_speculative_tokens)
    return tokens / (num_speculative_tokens * draft_cost + scoring_cost)


def operations(
    acceptance: float | Sequence[float], num_speculative_tokens: int, draft_operations: float
) -> float:
    """Returns the arithmetic per token over that of autoregressive sampling (theorem 3.11).

    `draft_operations` is relative to the target's operations per token.
    """
    K = num_speculative_tokens
    return (K * draft_operations + K + 1) / block_efficiency(acceptance, K)


def best_num_speculative_tokens(
    acceptance: float | Sequence[float],
    draft_cost: float | Callable[[int], float],
    scoring_cost: float | Callable[[int], float] = 1.0,
    most: int = 256,
) -> tuple[int, float]:
    """Returns the fastest K up to `most` and its speed-up, or (0, 1) if no speed-up is above 1.

    A cost is a number or a function of K.
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
    """Returns the acceptance rate that gives this block efficiency, the inverse of equation 1."""
    K = num_speculative_tokens
    if not 1 <= block_efficiency <= K + 1:
        raise InputError(
            f"block_efficiency: expected a number in [1, {K + 1}], "
            f"found {short_repr(block_efficiency)}"
        )
    # The sum grows with the rate, from 1 at rate 0 to K + 1 at rate 1, so there is one root.
    powers = np.arange(K + 1)
    return optimize.brentq(lambda rate: np.sum(rate**powers) - block_efficiency, 0.0, 1.0)


def fill_unreached(rates: Sequence[float | None]) -> list[float]:
    """Returns the rates by position; an unreached position has the rate of the position before."""
    filled: list[float] = []
    for rate in rates:
        filled.append(filled[-1] if rate is None else rate)
    return filled


def _rates(acceptance, num_speculative_tokens: int) -> np.ndarray:
    """Returns one acceptance rate per position."""
    rates = np.asarray(acceptance, float)
    if rates.ndim == 0:
        rates = np.full(num_speculative_tokens, rates)
    if len(rates) < num_speculative_tokens:
        raise InputError(
            f"acceptance: expected {num_speculative_tokens} rates, one per position, "
            f"found {len(rates)}"
        )
    rates = rates[:num_speculative_tokens]
    if not np.all((rates >= 0) & (rates <= 1)):
        raise InputError(f"acceptance: expected numbers in [0, 1], found {short_repr(acceptance)}")
    return rates
