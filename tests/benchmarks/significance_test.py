"""Coverage of the intervals, and error rates of the tests."""

import tracemalloc

import numpy as np
import pytest
import scipy.stats

from spsjax.benchmarks import significance


def ratio(above, below):
    return np.sum(above) / np.sum(below)


def test_bootstrap_interval_of_ratio_has_its_coverage():
    """The columns of a prompt stay together, so that a constant ratio has no spread."""
    values = np.random.default_rng(0).gamma(2.0, size=50)
    assert significance.bootstrap_interval(ratio, 3 * values, values) == pytest.approx((3, 3))
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        below = rng.gamma(4.0, size=60)
        above = 2.0 * below + rng.normal(0, 0.5, 60)
        low, high = significance.bootstrap_interval(
            ratio, above, below, level=0.9, resamples=150, seed=trial
        )
        held += low <= 2.0 <= high
    assert 165 <= held <= 193  # 180 expected


def test_bootstrap_interval_of_few_values_has_its_coverage():
    """Intervals of seven values are not too short; there is none of five.

    Plain percentiles hold the true value in 87% of the trials instead of 95.
    """
    rng, trials = np.random.default_rng(0), 300
    ends = [
        significance.bootstrap_interval(np.mean, rng.normal(0, 1, 7), resamples=400, seed=i)
        for i in range(trials)
    ]
    assert sum(low <= 0 <= high for low, high in ends) > 0.91 * trials
    assert significance.bootstrap_interval(np.mean, [1.0, 2.0, 3.0, 4.0, 5.0]) is None


def test_mean_interval_of_binary_scores_is_wilsons():
    """By hand, the upper end for 0 successes of n is 3.8415 / (n + 3.8415)."""
    assert significance.mean_interval([0.0] * 100) == pytest.approx((0, 3.8415 / 103.8415), 1e-4)
    assert significance.mean_interval([1.0, 1.0]) == pytest.approx((2 / 5.8415, 1), 1e-4)
    values = np.random.default_rng(0).normal(0.4, 0.1, 200)
    assert significance.mean_interval(values) == significance.bootstrap_interval(np.mean, values)


def test_paired_p_value_finds_differences_only():
    rng = np.random.default_rng(1)
    p_values = []
    for trial in range(100):
        one, other = rng.normal(0, 1, (2, 30))
        p_values.append(significance.paired_p_value(one, other, 400, trial))
    assert 30 < np.sum(np.asarray(p_values) < 0.5) < 70
    assert 0 < np.sum(np.asarray(p_values) < 0.1) < 22
    shared = rng.normal(0, 5, 30)  # what an example shares does not hide a difference
    one, other = shared + rng.normal(0.5, 0.2, 30), shared + rng.normal(0, 0.2, 30)
    assert significance.paired_p_value(one, other) < 1e-3
    assert significance.paired_p_value(one, one) == 1
    # With three prompts, 2 of 8 swaps are as far apart as differences of one sign.
    assert significance.paired_p_value([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]) == 2 / 8
    assert significance.paired_p_value([1.0], [0.0]) == 1


def texts(rng, probs, examples=40, samples=2, length=50):
    return [
        [rng.choice(len(probs), length, p=probs) for _ in range(samples)] for _ in range(examples)
    ]


def test_ngram_p_value_finds_another_distribution_only():
    rng = np.random.default_rng(2)
    probs = rng.dirichlet(np.ones(20))
    other = 0.85 * probs + 0.15 * rng.dirichlet(np.ones(20))
    for n in (1, 2):
        p_values = [
            significance.ngram_p_value(texts(rng, probs, 12), texts(rng, probs, 12), n, 200, trial)
            for trial in range(40)
        ]
        assert 9 < np.sum(np.asarray(p_values) < 0.5) < 31
        assert np.sum(np.asarray(p_values) < 0.02) <= 4
        assert significance.ngram_p_value(texts(rng, probs), texts(rng, other), n) < 0.01


def test_ngram_p_value_of_two_prompts_is_as_by_hand():
    one, other = [[[1, 1]], [[1]]], [[[2]], [[2, 2]]]
    # The texts: 3 of each n-gram on one side only, 3^2 / 3 twice. With one prompt swapped:
    # (2 - 1)^2 / 3 twice.
    assert significance.ngram_p_value(one, other, 1, 4000) == 0.5  # exact: all swaps are tried
    assert significance.ngram_p_value([[[1]]], [[[2]]], 2) == 1  # there are none
    one, other = [[[1]]] * 20, [[[2]]] * 20  # random swaps, of which the texts themselves are one
    assert significance.ngram_p_value(one, other, 1, 99) == pytest.approx(0.01)


@pytest.mark.parametrize(("sign", "p_value"), [(1, 1.0), (-1, 0.5)])
def test_ngram_p_value_weighs_rare_ngrams_as_by_hand(sign, p_value):
    """Differences count per occurrence, so that a rare token outweighs a frequent one.

    Token 5 occurs 21 times, with differences of 3 and +-2 in the two prompts; token 6 occurs 3
    times, with differences of -1 and +-2. To swap one prompt changes the distance by
    4 (-3 * 2 / 21 + 1 * 2 / 3) * sign. Without weights it would be 4 (-6 + 2) * sign.
    """
    one = [[[5] * 5, [5] * 2], [[5] * 6 + [6] * 2]]
    other = [[[5] * 4 + [6]], [[5], [5] * 3]]
    if sign < 0:
        one[1], other[1] = other[1], one[1]
    assert significance.ngram_p_value(one, other, 1, 4000) == p_value


def test_ngram_p_value_counts_repeated_ngrams_as_by_hand():
    """A token that occurs three times per prompt outweighs two that occur once.

    To swap one prompt changes the distance by 4 (3 * 3 / 6 - 1 * 1 / 2 - 1 * 1 / 2) = 2. If
    repetitions did not count it would be 4 (1 / 2 - 1 / 2 - 1 / 2) = -2.
    """
    one, other = [[[5, 7]], [[5, 7, 6, 6, 6]]], [[[6, 6, 6]], [[]]]
    assert significance.ngram_p_value(one, other, 1, 4000) == 1.0
    swapped = [one[0], other[1]], [other[0], one[1]]
    assert significance.ngram_p_value(*swapped, 1, 4000) == 0.5


def test_ngram_p_value_of_many_ngrams_takes_little_memory():
    rng = np.random.default_rng(0)
    sides = [[[rng.integers(0, 10**6, 250)] for _ in range(100)] for _ in range(2)]
    tracemalloc.start()
    significance.ngram_p_value(*sides, 2)
    assert tracemalloc.get_traced_memory()[1] < 1 << 25  # a table of all would take 40 MB
    tracemalloc.stop()


def test_ngram_p_value_of_order_needs_pairs():
    rng = np.random.default_rng(3)
    one = texts(rng, np.full(4, 0.25))
    other = [[np.sort(tokens) for tokens in example] for example in one]
    assert significance.ngram_p_value(one, other, 1) == 1
    assert significance.ngram_p_value(one, other, 2) < 0.01


def test_bootstrap_interval_without_spread_is_a_point():
    """Equal values have an interval of no width, where BCa itself is undefined."""
    assert significance.bootstrap_interval(np.mean, [2.0] * 8) == (2.0, 2.0)
    low, high = significance.bootstrap_interval(np.max, [0.0] * 7 + [1.0])
    assert 0 <= low <= high == 1


def test_bootstrap_interval_of_skewed_values_follows_the_skew():
    """BCa shifts the interval to the long side, where plain percentiles fall short."""
    rng = np.random.default_rng(0)
    values = rng.exponential(1.0, 40) ** 2
    low, high = significance.bootstrap_interval(np.mean, values, resamples=5000)
    means = rng.choice(values, (5000, 40)).mean(axis=1)
    quantile = scipy.stats.t.ppf(0.975, 39) * (40 / 39) ** 0.5
    plain_low, plain_high = np.quantile(means, scipy.stats.norm.cdf([-quantile, quantile]))
    assert low > plain_low + 0.1 and high > plain_high + 0.1
