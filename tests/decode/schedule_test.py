"""The schedule of "auto": rates, and the depth with the most tokens per time."""

import dataclasses

import jax
import numpy as np
import pytest

from spsjax import InputError, decode

RULE = decode.schedule.Fastest()
update, depths_of, rates_of = map(jax.jit, (RULE.update, RULE.depths, RULE.rates))


def costs(propose, score):
    return decode.schedule.Costs(*(np.asarray(times, np.float32) for times in (propose, score)))


def after(rounds, batch=1, depths=4):
    """Returns the history after rounds of (asked, offered, accepted), equal in all rows."""
    state = RULE.init(None, batch, depths)
    for round_ in rounds:
        state = update(state, *(np.full(batch, count) for count in round_))
    return state


def test_rate_of_a_depth_is_that_of_the_depth_above_until_it_is_known():
    m, hope, prior = RULE.memory, RULE.hope, RULE.prior
    np.testing.assert_allclose(rates_of(after([]))[0], [hope] * 4, rtol=1e-6)
    state = after([(2, 2, 0), (2, 2, 2)])
    first = (1 + hope) / (1 + m + 1)
    second = (1 + prior * first) / (1 + prior)
    np.testing.assert_allclose(rates_of(state)[0], [first, second, second, second], rtol=1e-6)


def test_history_begins_with_what_was_met_while_costs_were_measured():
    """Some rounds at those rates; nothing where they are not known."""
    rates = np.asarray([0.5, 0.8, 0.25], np.float32)
    measured = dataclasses.replace(costs([0] * 4, [1] * 4), rates=rates)
    state = RULE.init(measured, 2, 3)
    reached = RULE.trust * np.asarray([1, 0.5, 0.4])
    np.testing.assert_allclose(state.reached, [reached] * 2, rtol=1e-6)
    np.testing.assert_allclose(state.accepted, [reached * rates] * 2, rtol=1e-6)
    assert not state.asked.any() and not state.offered.any()
    for unknown in (None, costs([0] * 4, [1] * 4), decode.schedule.only(2, 3)):
        assert not any(leaf.any() for leaf in jax.tree.leaves(RULE.init(unknown, 2, 3)))


def test_history_counts_what_was_asked_offered_reached_and_accepted():
    state = after([(3, 2, 1)])
    assert state.asked.tolist() == [[1, 1, 1, 0]]
    assert state.offered.tolist() == [[1, 1, 0, 0]]
    assert state.reached.tolist() == [[1, 1, 0, 0]]
    assert state.accepted.tolist() == [[1, 0, 0, 0]]
    rested = after([(3, 2, 1), (0, 0, 0)])
    np.testing.assert_allclose(rested.asked, RULE.rest * state.asked, rtol=1e-6)
    drafted = after([(3, 2, 1), (1, 0, 0)])
    np.testing.assert_allclose(drafted.asked[0], [RULE.memory + 1] + 2 * [RULE.memory] + [0])


def test_depth_with_the_most_tokens_per_time_is_taken():
    """By brute force over all depths, for random histories, costs and rows that are done."""
    rng, taken = np.random.default_rng(0), set()
    for _ in range(60):
        state = decode.schedule.History(*np.sort(rng.random((4, 3, 4)) * 9, axis=0)[::-1])
        propose = np.cumsum([0, *rng.random(4) * rng.choice([0.1, 0.5, 2.0])])
        score = np.cumsum(rng.random(5) * [3, 1, 1, 1, 1])
        done = np.asarray([False, rng.random() < 0.5, rng.random() < 0.5])
        rates = np.asarray(rates_of(state), float)
        speeds = []
        for depth in range(5):
            tokens = sum(
                1 + sum(np.prod(rates[row, : d + 1]) for d in range(depth))
                for row in range(3)
                if not done[row]
            )
            time = propose[depth] + score[0]
            for d in range(depth):
                offered = (state.offered[:, d] + 1) / (state.asked[:, d] + 1)
                none = np.prod([1 - offered[row] for row in range(3) if not done[row]])
                time += (score[d + 1] - score[d]) * (1 - none)
            speeds.append(tokens / time)
        best = int(np.argmax(speeds))
        expected = np.where(done, 0, best).tolist()
        assert depths_of(costs(propose, score), state, done).tolist() == expected
        taken.add(best)
    assert len(taken) == 5


def test_scoring_passes_are_compiled_for_few_depths():
    assert decode.schedule.scored_depths(0) == (0,)
    assert decode.schedule.scored_depths(5) == (0, 1, 2, 4, 5)
    assert decode.schedule.scored_depths(7) == (0, 1, 2, 4, 6, 7)
    assert decode.schedule.scored_depths(30) == (0, 1, 2, 4, 6, 7, 11, 15, 23, 30)


def test_drafter_that_is_never_accepted_is_given_up_and_tried_again():
    """Of 400 rounds at most 2% of the time are lost, and the last tries are far apart."""
    propose, score = np.asarray([0, 0.2, 0.4, 0.6, 0.8]), np.ones(5)
    state, asked = after([]), []
    for _ in range(400):
        depth = depths_of(costs(propose, score), state, np.asarray([False]))
        state = update(state, depth, depth, np.zeros(1, np.int32))
        asked.append(int(depth[0]))
    lost = propose[asked].sum() / 400
    assert asked[0] > 0 and 0 < lost < 0.02
    late = np.flatnonzero(asked[100:])
    assert len(late) > 2 and np.diff(late).min() > 20


@pytest.mark.parametrize("depth", range(5))
def test_costs_of_one_depth_make_it_the_only_one(depth):
    """Whatever the history says; rows that are done are not drafted."""
    rng = np.random.default_rng(depth)
    state = decode.schedule.History(*np.sort(rng.random((4, 2, 4)) * 9, axis=0)[::-1])
    chosen = depths_of(decode.schedule.only(depth, 4), state, np.asarray([False, True]))
    assert chosen.tolist() == [depth, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 1.5}, "memory: expected a finite number of 0 or more, at most 1, found 1.5"),
        ({"rest": 1.5}, "rest: expected a finite number of 0 or more, at most 1, found 1.5"),
        ({"hope": -0.1}, "hope: expected a finite number of 0 or more, at most 1, found -0.1"),
        ({"prior": 0}, "prior: expected a finite number of 0.001 or more"),
    ],
)
def test_odd_options_are_refused(options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        decode.schedule.Fastest(**options)


def test_fixed_depth_beyond_the_longest_is_refused():
    for depth in (-1, 9, 1.0):
        with pytest.raises(InputError, match=f"^depth: expected .* from 0 to 8, found {depth}"):
            decode.schedule.Fixed(depth)
    with pytest.raises(InputError, match=r"^depth: expected an integer from 0 to 4, found 5"):
        decode.schedule.Fixed(5).check(4)
