"""Intervals hold what they should as often as they say, and tests see what is there."""

import tracemalloc

import numpy as np
import pytest

from spsjax.evaluation import significance


def ratio(above, below):
    return np.sum(above) / np.sum(below)


def test_an_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        below = rng.gamma(4.0, size=60)
        above = 2.0 * below + rng.normal(0, 0.5, 60)
        low, high = significance.interval(ratio, above, below, level=0.9, resamples=300, seed=trial)
        held += low <= 2.0 <= high
    assert 165 <= held <= 193  # 180 expected


def test_an_interval_of_few_is_not_too_short():
    """Plain percentiles hold the truth in 87% of the trials, instead of 95."""
    rng, trials = np.random.default_rng(0), 300
    ends = [
        significance.interval(np.mean, rng.normal(0, 1, 7), resamples=400, seed=i)
        for i in range(trials)
    ]
    assert sum(low <= 0 <= high for low, high in ends) > 0.91 * trials
    assert significance.interval(np.mean, [1.0, 2.0, 3.0, 4.0, 5.0]) is None


def test_an_interval_of_shares_is_wilson_s():
    """By hand: 3.8415 / (n + 3.8415) is the far end of none of n."""
    assert significance.interval_of_mean([0.0] * 100) == pytest.approx((0, 3.8415 / 103.8415), 1e-4)
    assert significance.interval_of_mean([1.0, 1.0]) == pytest.approx((2 / 5.8415, 1), 1e-4)
    values = np.random.default_rng(0).normal(0.4, 0.1, 200)
    assert significance.interval_of_mean(values) == significance.interval(np.mean, values)


def test_an_interval_keeps_an_example_s_values_together():
    values = np.random.default_rng(0).gamma(2.0, size=50)
    assert significance.interval(ratio, 3 * values, values) == pytest.approx((3, 3))


def test_a_difference_is_seen_and_none_is_not():
    rng = np.random.default_rng(1)
    chances = []
    for trial in range(100):
        one, other = rng.normal(0, 1, (2, 30))
        chances.append(significance.chance_of_difference(one, other, 400, trial))
    assert 30 < np.sum(np.asarray(chances) < 0.5) < 70
    assert 0 < np.sum(np.asarray(chances) < 0.1) < 22
    shared = rng.normal(0, 5, 30)  # what an example shares does not hide a difference
    one, other = shared + rng.normal(0.5, 0.2, 30), shared + rng.normal(0, 0.2, 30)
    assert significance.chance_of_difference(one, other) < 1e-3
    assert significance.chance_of_difference(one, one) == 1


def texts(rng, law, examples=40, samples=2, length=50):
    return [[rng.choice(len(law), length, p=law) for _ in range(samples)] for _ in range(examples)]


def test_ngrams_of_one_law_are_not_told_apart_and_those_of_another_are():
    rng = np.random.default_rng(2)
    law = rng.dirichlet(np.ones(20))
    other = 0.85 * law + 0.15 * rng.dirichlet(np.ones(20))
    for n in (1, 2):
        chances = [
            significance.chance_of_ngrams(texts(rng, law), texts(rng, law), n, 200, trial)
            for trial in range(40)
        ]
        assert 9 < np.sum(np.asarray(chances) < 0.5) < 31
        assert np.sum(np.asarray(chances) < 0.02) <= 4
        assert significance.chance_of_ngrams(texts(rng, law), texts(rng, other), n) < 0.01


def test_ngrams_are_counted_as_by_hand():
    """Two examples: half of the four swaps are as far apart as what was seen."""
    one, other = [[[1, 1]], [[1]]], [[[2]], [[2, 2]]]
    # Seen: 3 of each are apart, (3^2) / 3 twice; one example swapped: ((2 - 1)^2) / 3 and so on.
    assert significance.chance_of_ngrams(one, other, 1, 4000) == pytest.approx(0.5, abs=0.04)
    assert significance.chance_of_ngrams([[[1]]], [[[2]]], 2) == 1  # there are none


def test_many_ngrams_take_little_memory():
    rng = np.random.default_rng(0)
    sides = [[[rng.integers(0, 10**6, 1000)] for _ in range(50)] for _ in range(2)]
    tracemalloc.start()
    significance.chance_of_ngrams(*sides, 2)
    assert tracemalloc.get_traced_memory()[1] < 1 << 27  # a table of all would take 800 MB
    tracemalloc.stop()


def test_the_order_of_tokens_is_seen_by_pairs_alone():
    rng = np.random.default_rng(3)
    one = texts(rng, np.full(4, 0.25))
    other = [[np.sort(tokens) for tokens in example] for example in one]
    assert significance.chance_of_ngrams(one, other, 1) == 1
    assert significance.chance_of_ngrams(one, other, 2) < 0.01
