"""Calls with "auto": the costs that they measure, and the texts that they give."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import Call, assert_same_texts
from helpers.models import build_model
from helpers.numpy_models import numpy_nearby_model

import spsjax
from spsjax import InputError, SamplingParams, decode
from spsjax.drafters import base, hybrid, stopping, suffix
from spsjax.parallel import sharding
from spsjax.runtime import costs

PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def buffers(monkeypatch):
    """Buffers of 64 slots or more, so that calls share programs, which have no filters."""
    before = decode.sizes.num_slots
    at_least_64 = lambda length, roomy=False: max(64, before(length))  # noqa: E731
    monkeypatch.setattr(decode.sizes, "num_slots", at_least_64)
    with drafting.small_programs():
        yield


@pytest.fixture
def chain(monkeypatch):
    """Makes a model draft one token or none, so that few sizes are compiled."""
    monkeypatch.setattr(base, "SCHEDULED_TOKENS", 1)
    return lambda model: drafting.build("draft_model", model, 1)


def call_of(target, drafter, prompts=PROMPTS, sampling=SamplingParams(), max_new_tokens=20):
    """Returns a call of `generate` with "auto"."""
    return Call(target, prompts, drafter, "auto", sampling, max_new_tokens)


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
    out = spsjax.generate(target, PROMPTS, drafter, count, **options)
    assert_same_texts(out.tokens, expected.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("useful", (True, False))
def test_acceptance_is_met_where_costs_are_measured(target, chain, useful):
    """A draft that is the target begins with rates of 1, and one that is far from it with less."""
    model = target if useful else numpy_nearby_model(target, distance=3.0)
    call = call_of(target, chain(model))
    rates = np.asarray(costs.of(call.loop, call.batch).rates)
    assert rates.shape == (1,)
    assert (rates > 0.98).all() if useful else 0 <= rates[0] < 0.6


def test_costs_are_those_of_the_median_sweep(target, draft, monkeypatch):
    """Neither a disturbance nor a slow sweep counts, and a deeper round never costs less."""
    calls = itertools.count()

    def seconds(clock, depth):
        sweep, _ = divmod(next(calls), 8)
        wobble = -0.01 * (depth == 3)
        disturbed = 3.0 if sweep == 2 and depth == 2 else 0.0
        return (1 + (sweep - 1) % 3) * (1 + 0.1 * (depth > 1) + wobble) + disturbed

    monkeypatch.setattr(costs._Clock, "round", seconds)
    monkeypatch.setattr(costs, "_SECONDS", 60.0)
    costs._COSTS.clear()
    call = call_of(target, draft)
    measured = costs.of(call.loop, call.batch)
    costs._COSTS.clear()
    assert next(calls) == 8 * (1 + costs._MOST_SWEEPS)  # the first sweep compiles
    np.testing.assert_allclose(measured.score, 2 * np.asarray([1, 1, *[1.1] * 6]), rtol=1e-2)
    assert (np.diff(measured.score) >= 0).all() and not measured.propose.any()


@pytest.mark.parametrize(("kind", "rule"), [("stopping", "traversal"), ("hybrid", "block")])
def test_rounds_that_are_timed_fit_the_rule_of_the_call(target, draft, rule, kind):
    """Also a rule that needs distributions; a proposal of no meaning has them. It is traced."""
    loaded = drafting.build("draft_model", draft, 3)
    if kind == "stopping":
        drafter = stopping.Drafter(loaded.drafter, stopping.Entropy())
    else:
        drafter = hybrid.Drafter(loaded.drafter, suffix.Drafter(3))
    loaded = dataclasses.replace(loaded, drafter=drafter)
    call = Call(target, PROMPTS, loaded, 3, GREEDY, 8, verifier=rule)
    filled = dataclasses.replace(call.program, drafter=costs.Filler(call.program.drafter))

    def round_of(params, *inputs):
        state = decode.prompt.prefill(filled, call.slots, params, *inputs)
        return decode.step.step(filled, params, state).proposed

    proposed = jax.eval_shape(round_of, call.params, *call.inputs)
    assert proposed.shape == (len(PROMPTS),)


def test_costs_of_many_depths_are_interpolated(monkeypatch):
    monkeypatch.setattr(costs, "_SECONDS", 0.0)
    depths = decode.schedule.scored_depths(12)
    (by_depth,) = costs._by_depth([lambda depth: 1.0 + depth], depths, 12)
    np.testing.assert_allclose(by_depth, np.arange(1, 14), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tree_tokens", (0, 6))
def test_costs_of_drafters_that_often_propose_nothing_are_those_of_full_rounds(
    target, tree_tokens, monkeypatch
):
    """They score as many tokens as the depth, and the draft is timed alone."""
    monkeypatch.setattr(base, "SCHEDULED_TOKENS", 2)
    offered, before = set(), costs._Clock._run

    def watched(clock, count, known):
        proposed = np.asarray(0 if clock.state is None else clock.state.proposed)
        result = before(clock, count, known)
        if result[1]:
            depth = int(np.argmin(known.propose))
            filled = isinstance(clock.loop.program.drafter, costs.Filler)
            rounds = (np.asarray(clock.state.proposed) - proposed)[0] / result[1]
            offered.add((filled, depth, float(rounds)))
        return result

    monkeypatch.setattr(costs._Clock, "_run", watched)
    drafter = suffix.Drafter(2, tree_tokens)
    call = call_of(target, drafter, [[5, 9, 7]], max_new_tokens=30)
    measured = costs.measure(call.loop, call.batch)
    per_depth = tree_tokens // 2 or 1
    expected = {(True, depth, depth * per_depth) for depth in range(3)}
    assert {one for one in offered if one[0]} == expected
    assert measured.propose[0] == 0 and (measured.propose[1:] > 0).all()
    assert (measured.score > 0).all()


def test_costs_are_measured_on_half_of_the_prompts_with_keys_of_their_own(target, draft, chain):
    """So that there is room, and the depths of a call's rounds do not depend on its own draws."""
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8], [9]]
    call = call_of(target, chain(draft), prompts, max_new_tokens=4)
    clock = costs._Clock(call.loop, call.batch)
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
    costs._COSTS.clear()
    rounds, before = [], costs._Clock._run

    def counted(clock, count, known):
        result = before(clock, count, known)
        rounds.append(result[1])
        return result

    monkeypatch.setattr(costs._Clock, "_run", counted)
    drafter = chain(draft)
    call = call_of(target, drafter, max_new_tokens=0)
    costs.of(call.loop, call.batch)
    timed = rounds[2::3]
    assert min(timed) > 1 and max(timed) >= costs._LEAST_ROUNDS
    assert max(timed) <= costs._MOST_ROUNDS
    assert len(costs._COSTS) == 1
    call = call_of(target, drafter)
    costs.of(call.loop, call.batch)
    assert len(costs._COSTS) == 1
    costs._COSTS.clear()


@pytest.mark.parametrize("useful", (True, False))
def test_calls_with_auto_give_the_targets_greedy_tokens(target, draft, chain, useful):
    """With a useful draft, and with one that is not: its costs are measured once."""
    options = {"sampling": GREEDY, "max_new_tokens": 40}
    expected = spsjax.generate(target, PROMPTS, **options)
    costs._COSTS.clear()
    drafter = chain(draft if useful else numpy_nearby_model(draft, seed=9, distance=30.0))
    out = spsjax.generate(target, PROMPTS, drafter, "auto", **options)
    assert_same_texts(out.tokens, expected.tokens)
    assert len(out.stats.accepted_histogram) == 2
    (measured,) = costs._COSTS.values()
    again = spsjax.generate(target, PROMPTS, drafter, "auto", **options)
    assert out.stats.compile_seconds > 0 and again.stats.compile_seconds < 0.01
    assert measured.propose[0] == 0 and measured.score[0] > 0


def test_few_costs_are_kept(target, draft, monkeypatch):
    monkeypatch.setattr(costs, "measure", lambda *_: decode.schedule.only(0, 7))
    monkeypatch.setattr(costs, "_MOST_KEPT", 2)
    costs._COSTS.clear()
    for batch in range(1, 5):
        call = call_of(target, draft, PROMPTS[:batch])
        costs.of(call.loop, call.batch)
    assert len(costs._COSTS) == 3
    costs._COSTS.clear()


@pytest.mark.slow
def test_rows_that_are_done_learn_nothing(target, draft, chain):
    """A row goes on with what it knew, however long it was empty before the next text."""
    call = Call(target, [[3, 4], [5, 6]], chain(draft), "auto", GREEDY, [4, 60], 0, None, False)
    score = np.asarray([1, 1.2], np.float32)
    known = decode.schedule.Costs(0 * score, score, np.full(1, -1, np.float32))
    state, history = call.prefill(known), []
    while not np.asarray(state.done).all():
        state = call.loop.run(state, 2, known)
        if state.done[0]:
            history.append(jax.tree.map(lambda leaf: np.asarray(leaf)[0].tolist(), state.history))
    assert len(history) > 5 and all(one == history[0] for one in history)


@pytest.mark.slow
def test_calls_take_a_rule_with_other_numbers(target, draft, chain):
    """They need no other program."""
    options = {"sampling": GREEDY, "max_new_tokens": 20, "stop_at_eos": False}
    plain = spsjax.generate(target, PROMPTS[:1], **options)
    outputs = [
        spsjax.generate(target, PROMPTS[:1], chain(draft), rule, **options)
        for rule in (decode.schedule.Fastest(), decode.schedule.Fastest(hope=0.5, prior=2.0))
    ]
    for out in outputs:
        assert_same_texts(out.tokens, plain.tokens)
    assert outputs[1].stats.compile_seconds < 0.01


@pytest.mark.slow
def test_auto_on_eight_devices(target, draft, chain, monkeypatch):
    """Of the rows, one only fills the mesh: it is done, and must not make the clock begin anew."""
    clocks, begin = [], costs._Clock._begin_if_ended

    def counted(clock, *room):
        before = clock.state
        begin(clock, *room)
        clocks.append(clock.state is not before)

    monkeypatch.setattr(costs._Clock, "_begin_if_ended", counted)
    mesh = sharding.mesh(2, 4)
    on_mesh = functools.partial(build_model, mesh=mesh)
    many = [on_mesh(model.config, model.params) for model in (target, draft)]
    options = {"sampling": GREEDY, "max_new_tokens": 120, "stop_at_eos": False}
    out = spsjax.generate(many[0], PROMPTS[:3], chain(many[1]), "auto", **options)
    expected = spsjax.generate(target, PROMPTS[:3], **options)
    assert_same_texts(out.tokens, expected.tokens)
    assert 1 <= sum(clocks) < len(clocks) / 2


@pytest.mark.parametrize("count", ["Auto", "4", -1, 2.0, True])
def test_odd_k_is_refused(target, draft, count):
    with pytest.raises(InputError, match="expected an integer >= 0, 'auto' or 'confidence', found"):
        spsjax.generate(target, PROMPTS, draft, count, max_new_tokens=4)


def test_schedule_that_reads_estimates_needs_a_drafter_that_makes_them(target, draft):
    """Trees and look-ups are refused before anything is compiled; chains of a model are not."""
    both = hybrid.Drafter(drafting.build("draft_model", draft, 3).drafter, suffix.Drafter(3))
    loaded = spsjax.loading.LoadedDrafter("both", both, draft.params)
    tree = spsjax.loading.as_drafter(draft, target, PATHS[0])
    for drafter, name in ((tree, "draft_model, which drafts a tree"), (loaded, "hybrid")):
        with pytest.raises(InputError, match=f"estimates its acceptance.* found {name}"):
            spsjax.generate(target, PROMPTS, drafter, "confidence")
    rule = decode.confidence.Surviving(0.5)
    with pytest.raises(InputError, match=r"^num_speculative_tokens: .* found suffix\. Take"):
        spsjax.Engine(target, suffix.Drafter(3), rule)
    assert Call(target, PROMPTS, draft, rule).program.schedule.reads_confidence


def test_costs_of_a_draft_are_apart_where_a_part_of_it_may_be_scored(target, draft, monkeypatch):
    """A round of meaningless tokens takes what scoring takes; the rest is that of the draft."""

    def seconds(clock, depth):
        filled = isinstance(clock.loop.program.drafter, costs.Filler)
        return 1.0 + 0.1 * depth + (0 if filled else 0.3 * depth)

    monkeypatch.setattr(costs._Clock, "round", seconds)
    monkeypatch.setattr(costs, "_SECONDS", 0.0)
    call = Call(target, PROMPTS, draft, "confidence")
    measured = costs.measure(call.loop, call.batch)
    np.testing.assert_allclose(measured.propose, 0.3 * np.arange(8), atol=1e-6)
    np.testing.assert_allclose(measured.score, 1 + 0.1 * np.arange(8), rtol=1e-6)
