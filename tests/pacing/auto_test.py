"""Calls with "auto": the costs that they measure, and the texts that they give."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model
from helpers.numpy_models import numpy_nearby_model

import spsjax
from spsjax import InputError, SamplingParams, decode, execution, pacing, request
from spsjax.drafters import base, ngram
from spsjax.parallel import sharding

PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def buffers(monkeypatch):
    """Buffers of 64 slots or more, so that calls share programs."""
    before = decode.num_slots
    monkeypatch.setattr(decode, "num_slots", lambda length: max(64, before(length)))


@pytest.fixture
def chain(monkeypatch):
    """Makes a model draft one token or none, so that few sizes are compiled."""
    monkeypatch.setattr(base, "PACED_TOKENS", 1)
    return lambda model: drafting.build("draft_model", model, 1)


def call_of(target, drafter, prompts=PROMPTS, sampling=SamplingParams(), max_new_tokens=20):
    """Returns a call of `generate` with "auto"."""
    options = sampling, max_new_tokens, 0, None, True
    return request.Request("generate", target, prompts, drafter, "auto", *options)


def assert_greedy(out, expected):
    """Asserts that a call gave the tokens of another one."""
    for tokens, others in zip(out.tokens, expected.tokens, strict=True):
        np.testing.assert_array_equal(tokens, others)


def test_auto_drafts_chains_of_at_most_seven_tokens(target, draft):
    """Or as long as the drafter's own, or as it has heads."""
    for own, most in ((4, 7), (9, 9)):
        drafter = drafting.build("draft_model", draft, own)
        assert call_of(target, drafter).program.drafter.num_speculative_tokens == most
    four = drafting.head("medusa", target.config, num_speculative_tokens=2)
    loaded = spsjax.loading.LoadedDrafter("medusa", four, drafting.random_weights(four))
    assert call_of(target, loaded).program.drafter.num_speculative_tokens == 4


PATHS = spsjax.Tree((0, 1)), spsjax.DynamicTree(4, 4, 2)  # as many nodes as levels


@pytest.mark.parametrize("tree", PATHS, ids=str)
def test_auto_leaves_trees_as_they_are(target, draft, tree):
    drafter = spsjax.loading.as_drafter(draft, target, tree)
    assert call_of(target, drafter).program.drafter == drafter.drafter


@pytest.mark.slow
@pytest.mark.parametrize("count", (None, "auto"))
def test_tree_that_is_a_path_gives_the_targets_greedy_tokens(target, draft, count):
    """By the default rule, which takes chains and trees."""
    drafter = spsjax.loading.as_drafter(draft, target, PATHS[0])
    options = {"sampling": GREEDY, "max_new_tokens": 12}
    expected = spsjax.generate(target, PROMPTS, **options)
    assert_greedy(spsjax.generate(target, PROMPTS, drafter, count, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("useful", (True, False))
def test_acceptance_is_met_where_costs_are_measured(target, chain, useful):
    """A draft that is the target begins with rates of 1, and one that is far from it with less."""
    model = target if useful else numpy_nearby_model(target, distance=3.0)
    measured = call_of(target, chain(model))
    execution.prepare(measured)
    rates = np.asarray(measured.params["costs"].rates)
    assert rates.shape == (1,)
    assert (rates > 0.98).all() if useful else 0 <= rates[0] < 0.6


@pytest.mark.slow
def test_look_up_with_auto_gives_the_targets_greedy_tokens(target, monkeypatch):
    monkeypatch.setattr(base, "PACED_TOKENS", 2)
    options = {"sampling": GREEDY, "max_new_tokens": 40}
    expected = spsjax.generate(target, PROMPTS, **options)
    assert_greedy(spsjax.generate(target, PROMPTS, ngram.Drafter(2), "auto", **options), expected)


def test_costs_are_those_of_the_median_sweep(target, draft, monkeypatch):
    """Neither a disturbance nor a slow sweep counts; the times of drafting lie on a line."""
    calls = itertools.count()

    def seconds(clock, drafts, depth):
        sweep, timed = divmod(next(calls), 12)  # six depths, with the drafter and without
        wobble = drafts * 0.01 * (depth % 4 == 0)
        base = 1 + 0.1 * (depth > 1) + 0.5 * (depth > 4) + drafts * 0.2 * depth * (depth > 0)
        disturbed = 3.0 if sweep == 2 and timed == 2 else 0.0
        return (1 + (sweep - 1) % 3) * (base + wobble) + disturbed

    monkeypatch.setattr(execution._Clock, "seconds", seconds)
    monkeypatch.setattr(execution, "_SECONDS", 60.0)
    execution._COSTS.clear()
    execution.prepare(call_of(target, draft))
    (measured,) = execution._COSTS.values()
    execution._COSTS.clear()
    assert next(calls) == 12 * (1 + execution._MOST_SWEEPS)  # the first one compiles
    np.testing.assert_allclose(
        measured.score, 2 * np.asarray([1, 1, *[1.1] * 3, *[1.6] * 3]), rtol=1e-2
    )
    np.testing.assert_allclose(measured.propose, 2 * np.arange(8) * 0.2, atol=0.03)
    np.testing.assert_allclose(np.diff(measured.propose[1:], 2), 0, atol=1e-5)


def test_line_of_times_is_never_below_zero():
    """The nearest line through them would give the first depths less than nothing."""
    depths = np.asarray([1, 2, 4, 6])
    begin, step = execution._line(depths, 0.1 * depths**2.0)
    assert begin == 0 and 0.1 < step < 0.6
    np.testing.assert_allclose(execution._line(depths, 3 + 0.5 * depths), (3, 0.5))
    np.testing.assert_allclose(execution._line(depths, 3 - 0.1 * depths), (3 - 0.325, 0))


@pytest.mark.parametrize("depths", ((0,), (0, 1), (0, 1, 2, 4)))
def test_costs_never_fall_with_the_depth(depths):
    """Drafts that cost nothing, and a deep pass that was measured as the shortest, by chance."""
    times = np.ones((3, len(depths), 2))
    times[:, -1] = 0.9
    times[:, 1:2, 0] = 1.05
    propose, score = execution._costs(times, np.asarray(depths))
    assert propose.shape == score.shape == (depths[-1] + 1,)
    assert propose[0] == 0 and (propose[1:] > 0).all()
    assert (np.diff(propose[1:]) >= 0).all() and (np.diff(score) >= 0).all()


def test_costs_are_measured_on_half_of_the_prompts_with_keys_of_their_own(target, draft, chain):
    """So that there is room, and the depths of a call's rounds do not depend on its own draws."""
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8], [9]]
    call = call_of(target, chain(draft), prompts, max_new_tokens=4)
    clock = execution._Clock(call)
    clock._begin_if_ended()
    np.testing.assert_array_equal(clock.state.lengths, [3, 1, 1, 1])
    np.testing.assert_array_equal(clock.state.limits, [call.slots - 2] * 4)
    used = {tuple(key) for key in jax.random.key_data(clock.state.keys).tolist()}

    @jax.jit
    def of_rounds(keys):
        rounds = jax.vmap(jax.random.fold_in, (None, 0))
        own = jax.vmap(rounds, (0, None))(keys, jnp.arange(call.slots))
        return jax.random.key_data(keys), jax.random.key_data(own)

    for own in of_rounds(call.inputs[-1]):
        assert used.isdisjoint(map(tuple, np.asarray(own).reshape(-1, own.shape[-1]).tolist()))
    state = clock.state
    clock._begin_if_ended()
    assert clock.state is state


def test_costs_are_measured_on_whole_rounds_whatever_the_budget(target, draft, chain, monkeypatch):
    """A call without new tokens measures what a later call of the same buffers needs."""
    execution._COSTS.clear()
    rounds, before = [], execution._Clock._run

    def counted(clock, count):
        result = before(clock, count)
        rounds.append(result[1])
        return result

    monkeypatch.setattr(execution._Clock, "_run", counted)
    drafter = chain(draft)
    execution.prepare(call_of(target, drafter, max_new_tokens=0))
    timed = rounds[2::3]
    assert min(timed) > 1 and max(timed) >= execution._LEAST_ROUNDS
    assert max(timed) <= execution._MOST_ROUNDS
    assert len(execution._COSTS) == 1
    execution.prepare(call_of(target, drafter))
    assert len(execution._COSTS) == 1
    execution._COSTS.clear()


@pytest.mark.parametrize("useful", (True, False))
def test_calls_with_auto_give_the_targets_greedy_tokens(target, draft, chain, useful):
    """With a useful draft, and with one that is not: its costs are measured once."""
    options = {"sampling": GREEDY, "max_new_tokens": 40}
    expected = spsjax.generate(target, PROMPTS, **options)
    execution._COSTS.clear()
    drafter = chain(draft if useful else numpy_nearby_model(draft, seed=9, distance=30.0))
    out = spsjax.generate(target, PROMPTS, drafter, "auto", **options)
    assert_greedy(out, expected)
    assert len(out.stats.accepted_histogram) == 2
    (measured,) = execution._COSTS.values()
    again = spsjax.generate(target, PROMPTS, drafter, "auto", **options)
    assert out.stats.compile_seconds > 0 and again.stats.compile_seconds < 0.01
    assert (measured.propose[0], measured.least) == (0, 0)
    assert measured.score[0] > 0


def test_few_costs_are_kept(target, draft, monkeypatch):
    monkeypatch.setattr(execution, "_measure", lambda call: pacing.forced(0, 7))
    monkeypatch.setattr(execution, "_MOST_KEPT", 2)
    execution._COSTS.clear()
    for batch in range(1, 5):
        execution.prepare(call_of(target, draft, PROMPTS[:batch]))
    assert len(execution._COSTS) == 3
    execution._COSTS.clear()


@pytest.mark.slow
def test_rows_that_are_done_learn_nothing(target, draft, chain):
    """A row goes on with what it knew, however long it was empty before the next text."""
    arguments = [[3, 4], [5, 6]], chain(draft), "auto", GREEDY, [4, 60], 0, None, False
    call = request.Request("test", target, *arguments)
    score = np.asarray([1, 1.2], np.float32)
    call.params["costs"] = execution.placed(call, pacing.Costs(0 * score, score, np.int32(0)))
    state, _ = execution.prefill(call)
    pace = []
    while not np.asarray(state.done).all():
        state, _ = execution.run(call, state, 2)
        if state.done[0]:
            pace.append(jax.tree.map(lambda leaf: np.asarray(leaf)[0].tolist(), state.pace))
    assert len(pace) > 5 and all(one == pace[0] for one in pace)


@pytest.mark.slow
def test_calls_take_a_rule_with_other_numbers(target, draft, chain):
    """They need no other program."""
    options = {"sampling": GREEDY, "max_new_tokens": 20, "stop_at_eos": False}
    plain = spsjax.generate(target, PROMPTS[:1], **options)
    outputs = [
        spsjax.generate(target, PROMPTS[:1], chain(draft), rule, **options)
        for rule in (pacing.Fastest(), pacing.Fastest(hope=0.5, prior=2.0))
    ]
    for out in outputs:
        assert_greedy(out, plain)
    assert outputs[1].stats.compile_seconds < 0.01


@pytest.mark.slow
def test_rounds_of_trees_take_auto(target, draft):
    trees = spsjax.loading.as_drafter(draft, target, spsjax.Tree.branching(2, 1))
    options = {"sampling": GREEDY, "max_new_tokens": 12}
    expected = spsjax.generate(target, PROMPTS[:1], **options)
    _, rounds = spsjax.generation.rounds(target, PROMPTS[0], trees, "auto", **options)
    tokens = np.concatenate([round_.tokens for round_ in rounds])
    np.testing.assert_array_equal(tokens, expected.tokens[0])


@pytest.mark.slow
def test_auto_on_eight_devices(target, draft, chain, monkeypatch):
    """Of the rows, one only fills the mesh: it is done, and must not make the clock begin anew."""
    clocks, begin = [], execution._Clock._begin_if_ended

    def counted(clock, *room):
        before = clock.state
        begin(clock, *room)
        clocks.append(clock.state is not before)

    monkeypatch.setattr(execution._Clock, "_begin_if_ended", counted)
    mesh = sharding.mesh(2, 4)
    on_mesh = functools.partial(build_model, mesh=mesh)
    many = [on_mesh(model.config, model.params) for model in (target, draft)]
    options = {"sampling": GREEDY, "max_new_tokens": 120, "stop_at_eos": False}
    out = spsjax.generate(many[0], PROMPTS[:3], chain(many[1]), "auto", **options)
    expected = spsjax.generate(target, PROMPTS[:3], **options)
    assert_greedy(out, expected)
    assert 1 <= sum(clocks) < len(clocks) / 2


@pytest.mark.parametrize("count", ["Auto", "4", -1, 2.0, True])
def test_odd_k_is_refused(target, draft, count):
    with pytest.raises(InputError, match='expected an integer >= 0 or "auto", found'):
        spsjax.generate(target, PROMPTS, draft, count, max_new_tokens=4)
