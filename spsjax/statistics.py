"""Intervals and tests for two samplers on the same prompts, by resampling: no law is assumed.

The unit is an example, because tokens of one text, and texts of one prompt, are not independent.
"""

import collections
from collections.abc import Callable, Sequence

import numpy as np

Statistic = Callable[..., float]


def interval(
    statistic: Statistic,
    *columns: Sequence[float],
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap (Efron 1979) of `statistic(*columns)`: low and high end.

    Examples are drawn anew with replacement; each column has one value an example, and they stay
    together.
    """
    table = np.asarray(columns, float)
    rng = np.random.default_rng(seed)
    count = table.shape[1]
    drawn = [statistic(*table[:, rng.integers(0, count, count)]) for _ in range(resamples)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def chance_of_difference(
    one: Sequence[float], other: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> float:
    """Chance of means at least so far apart if the two were one sampler: a p value.

    Each example's two values are swapped at random, which changes nothing under that hypothesis
    (Fisher 1935); hence it is exact but for the number of resamples.
    """
    differences = np.asarray(one, float) - np.asarray(other, float)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (resamples, len(differences)))
    seen = abs(differences.sum())
    return _share(np.abs(signs @ differences), seen)


def chance_of_ngrams(
    one: Sequence[Sequence[Sequence[int]]],
    other: Sequence[Sequence[Sequence[int]]],
    n: int = 1,
    resamples: int = 1000,
    seed: int = 0,
) -> float:
    """Chance of counts of n-grams at least so far apart if the two were one sampler: a p value.

    Args:
        one, other: of each example, its texts as token ids; as many of the one as of the other.
        n: tokens of an n-gram.
        resamples: each swaps the two sides of every example at random.
        seed: of the swaps.

    How far apart is sum (a - b)^2 / (a + b) over the n-grams that either side has.
    """
    index: dict[tuple, int] = {}
    sides = []
    for texts in (one, other):
        counts = [collections.Counter(_ngrams(example, n)) for example in texts]
        for each in counts:
            for ngram in each:
                index.setdefault(ngram, len(index))
        sides.append(counts)
    differences = np.zeros((len(one), len(index)))
    total = np.zeros(len(index))
    for counts, sign in zip(sides, (1, -1)):
        for row, each in enumerate(counts):
            for ngram, count in each.items():
                differences[row, index[ngram]] += sign * count
                total[index[ngram]] += count
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], (resamples, len(one)))
    signs = np.concatenate([np.ones((1, len(one))), signs])
    distances = ((signs @ differences) ** 2 / np.maximum(total, 1)).sum(axis=1)
    return _share(distances[1:], distances[0])


def _ngrams(texts: Sequence[Sequence[int]], n: int):
    for tokens in texts:
        yield from (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _share(drawn: np.ndarray, seen: float) -> float:
    """Of what is at least as far, what was seen itself included."""
    return float((1 + np.sum(drawn >= seen * (1 - 1e-12))) / (1 + len(drawn)))
