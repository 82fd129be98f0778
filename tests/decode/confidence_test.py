"""Schedules by confidence: how much of a round is scored, and how estimates are corrected."""

import dataclasses

import jax
import numpy as np
import pytest

from spsjax import InputError, decode
from spsjax.decode.confidence import Confident, Surviving

RULE = Confident()
K = 4
SIZES = 0, 1, 2, 4
update, kept_of, corrected_of = map(jax.jit, (RULE.update, RULE.kept, RULE.corrected))


def costs(propose, score):
    return decode.schedule.Costs(*(np.asarray(times, np.float32) for times in (propose, score)))


def corrected(rows, bins, confidence):
    """Returns the oracle's corrected estimates of a row; `bins` are (accepted, estimated)."""
    accepted, estimated = bins
    chances = []
    for one in confidence:
        index = min(int(np.float32(one) * np.float32(10)), 9)
        weight = RULE.prior * (index + 0.5) / 10
        factor = (accepted[rows, index] + weight) / (estimated[rows, index] + weight)
        chances.append(min(one * factor, 1))
    return chances


def scored_depth(times, chances, typical, asked):
    """Returns the oracle's depth: sizes of passes from small to large, while a larger one pays."""

    def speed(size, known):
        tokens = 0.0
        for row, row_chances in enumerate(chances):
            survival, tokens = 1.0, tokens + (asked[row] > 0)
            for slot in range(min(size, asked[row])):
                survival *= row_chances[slot] if slot <= known else typical[row]
                tokens += survival
        return tokens / times[size]

    for index, size in enumerate(SIZES):
        larger = [speed(other, size) for other in SIZES[index + 1 :]]
        if not larger or max(larger) < speed(size, size):
            return size


def random_round(rng):
    """Returns costs, a state, depths and estimates of three rows."""
    propose = np.cumsum([0, *rng.random(K) * rng.choice([0.01, 0.3])])
    score = 1 + np.cumsum(rng.random(K + 1) * rng.choice([0.05, 0.5, 1.5]))
    scored = rng.random((3, 10)) * 9
    estimated, accepted = scored * (np.arange(10) + 0.5) / 10, scored * rng.random((3, 10))
    history = decode.schedule.Fastest().init(None, 3, K)
    state = decode.confidence.Estimated(history, scored, estimated, accepted)
    asked = rng.choice([2, K]) * np.asarray([1, rng.random() < 0.7, rng.random() < 0.7], np.int32)
    confidence = rng.random((3, K)).astype(np.float32) ** rng.choice([0.2, 1, 3])
    return costs(propose, score), state, asked, confidence


def test_size_that_pays_is_scored():
    """By brute force, for random costs, counts, estimates, and rows that are done."""
    rng, taken = np.random.default_rng(0), set()
    for _ in range(80):
        known, state, asked, confidence = random_round(rng)
        chances, typical = [], []
        for row in range(3):
            bins = state.accepted, state.estimated
            chances.append(corrected(row, bins, confidence[row]))
            accepted = state.accepted[row].sum() + RULE.prior * RULE.hope
            typical.append(accepted / (state.scored[row].sum() + RULE.prior))
        times = known.propose[asked.max()] + known.score
        expected = scored_depth(times, chances, typical, asked)
        result = kept_of(known, state, asked, confidence)
        assert result.tolist() == np.where(asked > 0, expected, 0).tolist()
        taken.add(expected)
    assert taken == {*SIZES}


@pytest.mark.parametrize("rule", [RULE, Surviving(0.3)], ids=["confident", "surviving"])
def test_no_token_is_dropped_by_an_estimate_that_knows_it(rule):
    """Other estimates behind the first dropped token leave the row's length as it is."""
    rng, cut = np.random.default_rng(1), 0
    kept = jax.jit(rule.kept)
    for _ in range(60):
        known, state, asked, confidence = random_round(rng)
        before = np.asarray(kept(known, state, asked, confidence))
        row = rng.integers(3)
        behind = np.arange(K) > before[row]
        confidence[row] = np.where(behind, rng.choice([0.0, 0.999]), confidence[row])
        assert kept(known, state, asked, confidence)[row] == before[row]
        cut += behind.any()
    assert cut > 20


@pytest.mark.parametrize("depth", range(K + 1))
def test_costs_of_one_depth_score_all_of_it(depth):
    """So that rounds of one depth can be timed, whatever is estimated."""
    _, state, _, confidence = random_round(np.random.default_rng(depth))
    only = decode.schedule.only(depth, K)
    asked = RULE.depths(only, state, np.asarray([False, True, False]))
    assert asked.tolist() == [depth, 0, depth]
    result = kept_of(only, state, np.asarray(asked), confidence)
    assert result[0] >= depth and result[1] == 0


def test_estimates_are_corrected_by_what_was_accepted():
    """Of tokens that were decided about, by the size of their estimates; each row has its own."""
    state = RULE.init(None, 2, K)
    confidence = np.asarray([[0.95, 0.92, 0.45, 0.45]] * 2, np.float32)
    np.testing.assert_allclose(corrected_of(state, confidence), confidence)
    # Row 0 accepts one of two scored tokens, and the third was not scored. Row 1 accepts all.
    counts = (np.asarray(count, np.int32) for count in ([4, 4], [2, 4], [1, 4]))
    state = update(state, *counts, confidence)
    weight = RULE.prior * np.asarray([0.95, 0.45])
    sums = np.asarray([1.87, 0.9])
    factors = [(1 + weight[0]) / (sums[0] + weight[0]), 1], (2 + weight) / (sums + weight)
    factors = np.repeat(factors, 2, axis=1)
    result = corrected_of(state, confidence)
    np.testing.assert_allclose(result, np.minimum(confidence * factors, 1), rtol=1e-6)
    assert state.scored.sum(axis=1).tolist() == [2, 4]
    # A round without a draft only lets counts shrink.
    rested = update(state, *(np.zeros(2, np.int32),) * 3, None)
    np.testing.assert_allclose(rested.accepted, RULE.rest * state.accepted, rtol=1e-6)
    np.testing.assert_allclose(rested.history.asked, RULE.rest * state.history.asked, rtol=1e-6)


def test_chain_is_scored_as_long_as_it_survives():
    rule = Surviving(0.3)
    state = rule.init(None, 3, K)
    asked = rule.depths(None, state, np.asarray([False, False, True]))
    assert asked.tolist() == [K, K, 0]
    confidence = np.asarray([[0.9, 0.5, 0.6, 1.0], [0.2, 1, 1, 1], [0] * K])
    assert rule.kept(None, state, asked, confidence).tolist() == [2, 0, 0]
    with pytest.raises(InputError, match=r"^least: expected a finite number of 0 or more, at most"):
        dataclasses.replace(rule, least=1.5)
