"""Intervals and tests for two samplers on the same prompts, by resampling: no law is assumed.

The unit is an example, because tokens of one text, and texts of one prompt, are not independent.
"""

import collections
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.sparse
import scipy.stats

Statistic = Callable[..., float]


def interval(
    statistic: Statistic,
    *columns: Sequence[float],
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Bootstrap interval of `statistic(*columns)`, its low and high end; None of fewer than six.

    Examples are drawn anew with replacement; each column has one value an example, and they stay
    together. Percentiles are further out than the level says, as far as Student's t is for so many
    examples: without it, intervals of few are too short (Hesterberg 2015, arXiv 1411.5279).
    """
    table = np.asarray(columns, float)
    count = table.shape[1]
    if count < 6:
        return None  # all may lie on one side of the truth: of five, once in sixteen times
    rng = np.random.default_rng(seed)
    drawn = [statistic(*table[:, rng.integers(0, count, count)]) for _ in range(resamples)]
    further = scipy.stats.t.ppf((1 + level) / 2, count - 1) * math.sqrt(count / (count - 1))
    low, high = np.quantile(drawn, scipy.stats.norm.cdf([-further, further]))
    return float(low), float(high)


def interval_of_mean(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Of scores. Where all are 0 or 1 it is Wilson's (1927): none of few is not none of all."""
    values = np.asarray(values, float)
    if not np.all((values == 0) | (values == 1)):
        return interval(np.mean, values, level=level)
    found = scipy.stats.binomtest(int(values.sum()), len(values)).proportion_ci(level, "wilson")
    return float(found.low), float(found.high)


def chance_of_difference(
    one: Sequence[float], other: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> float:
    """Chance of means at least so far apart if the two were one sampler: a p value.

    Each example's two values are swapped at random, which changes nothing under that hypothesis
    (Fisher 1935); hence it is exact but for the number of resamples.
    """
    differences = np.asarray(one, float) - np.asarray(other, float)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (resamples, len(differences)))
    return _share(np.abs(signs @ differences), abs(differences.sum()))


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
    rows, columns, counts = [], [], []
    for sign, texts in ((1, one), (-1, other)):
        for row, example in enumerate(texts):
            for ngram, count in collections.Counter(_ngrams(example, n)).items():
                rows.append(row)
                columns.append(index.setdefault(ngram, len(index)))
                counts.append(sign * count)
    if not index:
        return 1.0  # texts too short to have any
    shape = len(one), len(index)
    counts = np.asarray(counts, float)
    total = np.bincount(columns, np.abs(counts), len(index))
    differences = scipy.sparse.csr_array((counts, (rows, columns)), shape)
    # The distance is a quadratic form of the signs: between examples, however many the n-grams.
    between = (differences @ scipy.sparse.diags_array(1 / total) @ differences.T).toarray()
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (resamples, len(one)))
    return _share(((signs @ between) * signs).sum(axis=1), between.sum())


def _ngrams(texts: Sequence[Sequence[int]], n: int):
    for tokens in texts:
        yield from (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _share(drawn: np.ndarray, seen: float) -> float:
    """Of what is at least as far, what was seen itself included."""
    return float((1 + np.sum(drawn >= seen - 1e-9 * abs(seen))) / (1 + len(drawn)))
