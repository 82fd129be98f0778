"""Confidence intervals and tests for two systems on the same prompts, by resampling.

No distribution is assumed. The unit is a prompt, because neither the tokens of one text nor the
texts of one prompt are independent.
"""

import collections
import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import scipy.sparse
import scipy.stats

# Minimum number of values for an interval: five values all lie on one side of the true value with
# probability 1/16.
_LEAST_VALUES = 6
_BATCH = 1000  # permutations per batch, which bounds the memory of a test

Interval = tuple[float, float] | None  # low and high end; None: too few prompts
Statistic = Callable[..., float]


def bootstrap_interval(
    statistic: Statistic,
    *columns: Sequence[float],
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Returns a confidence interval of `statistic(*columns)`, or None for fewer than six values.

    The interval is the bias-corrected and accelerated bootstrap interval (BCa; Efron 1987), at a
    level raised for small samples: the normal quantile becomes Student's t times
    sqrt(n / (n - 1)), because the bootstrap underestimates the spread of few values (Hesterberg
    2015, arXiv 1411.5279).

    Args:
        statistic: function of the columns. With an argument `axis` it is called once for many
            resamples.
        columns: columns with one value per prompt; the values of a prompt are resampled together.
        level: confidence level.
        resamples: number of resamples.
        seed: random seed.
    """
    table = np.asarray(columns, float)
    count = table.shape[1]
    if count < _LEAST_VALUES:
        return None
    quantile = scipy.stats.t.ppf((1 + level) / 2, count - 1) * math.sqrt(count / (count - 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of degenerate data, which are handled below
        result = scipy.stats.bootstrap(
            tuple(table),
            statistic,
            paired=True,
            method="BCa",
            confidence_level=2 * scipy.stats.norm.cdf(quantile) - 1,
            n_resamples=resamples,
            rng=np.random.default_rng(seed),
        )
    low, high = result.confidence_interval
    if not np.isfinite([low, high]).all():
        # BCa is undefined if a statistic does not vary, or if all resamples lie on one side of it.
        ends = scipy.stats.norm.cdf([-quantile, quantile])
        low, high = np.quantile(result.bootstrap_distribution, ends)
    return float(low), float(high)


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Returns a confidence interval of a mean score.

    For 0/1 scores it is Wilson's interval (1927), which stays informative when no sample succeeds.
    """
    values = np.asarray(values, float)
    if not np.all((values == 0) | (values == 1)):
        return bootstrap_interval(np.mean, values, level=level)
    interval = scipy.stats.binomtest(int(values.sum()), len(values)).proportion_ci(level, "wilson")
    return float(interval.low), float(interval.high)


def paired_p_value(
    one: Sequence[float], other: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> float:
    """Returns the p-value of a difference of two means under the hypothesis of equal systems.

    The two values of a prompt are swapped at random (Fisher 1935). The p-value is exact if
    `resamples` is at least the number of all swaps.
    """
    differences = np.asarray(one, float) - np.asarray(other, float)
    if len(differences) < 2 or not differences.any():
        return 1.0  # every swap gives the same difference

    def distance(differences, axis):
        return np.abs(differences.sum(axis=axis))

    return _sign_flip_p_value(differences, distance, resamples, seed)


def ngram_p_value(
    one: Sequence[Sequence[Sequence[int]]],
    other: Sequence[Sequence[Sequence[int]]],
    n: int = 1,
    resamples: int = 1000,
    seed: int = 0,
) -> float:
    """Returns the p-value of a difference of n-gram counts under the hypothesis of equal systems.

    The distance is sum (a - b)^2 / (a + b) over the n-grams that occur on either side.

    Args:
        one, other: texts per prompt as token ids; both sides have the same number of texts.
        n: number of tokens per n-gram.
        resamples: number of random swaps of the two sides of every prompt.
        seed: random seed of the swaps.
    """
    index: dict[tuple, int] = {}
    rows, columns, counts = [], [], []
    for sign, texts in ((1, one), (-1, other)):
        for row, prompt_texts in enumerate(texts):
            for ngram, count in collections.Counter(_ngrams(prompt_texts, n)).items():
                rows.append(row)
                columns.append(index.setdefault(ngram, len(index)))
                counts.append(sign * count)
    if not index or len(one) < 2:
        return 1.0  # the texts are too short, or a swap only exchanges the names
    shape = len(one), len(index)
    counts = np.asarray(counts, float)
    total = np.bincount(columns, np.abs(counts), len(index))
    differences = scipy.sparse.csr_array((counts, (rows, columns)), shape)
    # The distance is a quadratic form of the prompts' signs. Its matrix is as large as the number
    # of prompts, however many n-grams there are.
    matrix = (differences @ scipy.sparse.diags_array(1 / total) @ differences.T).toarray()

    def distance(signs, axis):
        signs = np.moveaxis(signs, axis, -1)
        return ((signs @ matrix) * signs).sum(axis=-1)

    return _sign_flip_p_value(np.ones(len(one)), distance, resamples, seed)


def _sign_flip_p_value(values: np.ndarray, statistic: Statistic, resamples: int, seed: int):
    """Returns the share of sign flips whose statistic is at least that of the values."""
    result = scipy.stats.permutation_test(
        (values,),
        statistic,
        permutation_type="samples",
        alternative="greater",
        vectorized=True,
        n_resamples=resamples,
        batch=_BATCH,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def _ngrams(texts: Sequence[Sequence[int]], n: int):
    for tokens in texts:
        yield from (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
