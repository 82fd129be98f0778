"""K that is chosen in every round: the rule's arithmetic, rounds without a draft, "auto"."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model, nearby_model

import spsjax
from spsjax import InputError, SamplingParams, decode, execution, pacing, sampling, verifiers
from spsjax.drafters import ngram, waiting
from spsjax.parallel import sharding

K = 3
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
GREEDY = SamplingParams(temperature=0.0)
RULE = pacing.Fastest()


def costs(propose, score, least=0):
    return pacing.Costs(*(np.asarray(part, np.float32) for part in (propose, score)), least)


def after(rounds, batch=1, depths=4):
    """Returns the history after rounds of (asked, offered, accepted), equal in all rows."""
    state = RULE.init(None, batch, depths)
    for round_ in rounds:
        state = RULE.update(None, state, *(jnp.full(batch, count) for count in round_))
    return state


def chosen(state, *arrays, done=(False,)):
    return RULE.depths(costs(*arrays), state, jnp.asarray(done)).tolist()


def test_rate_of_a_depth_is_that_of_the_depth_above_until_it_is_known():
    m, hope, prior = RULE.memory, RULE.hope, RULE.prior
    np.testing.assert_allclose(RULE.rates(after([]))[0], [hope] * 4, rtol=1e-6)
    state = after([(2, 2, 0), (2, 2, 2)])
    first = (1 + hope) / (1 + m + 1)
    second = (1 + prior * first) / (1 + prior)
    np.testing.assert_allclose(RULE.rates(state)[0], [first, second, second, second], rtol=1e-6)


def test_history_begins_with_what_was_met_while_costs_were_measured():
    """Some rounds at those rates; nothing where they are not known."""
    rates = np.asarray([0.5, 0.8, 0.25], np.float32)
    measured = dataclasses.replace(costs([0] * 4, [1] * 4), rates=rates)
    state = RULE.init(measured, 2, 3)
    reached = RULE.trust * np.asarray([1, 0.5, 0.4])
    np.testing.assert_allclose(state.reached, [reached] * 2, rtol=1e-6)
    np.testing.assert_allclose(state.accepted, [reached * rates] * 2, rtol=1e-6)
    assert not state.asked.any() and not state.offered.any()
    for unknown in (None, costs([0] * 4, [1] * 4), pacing.forced(2, 3)):
        assert not any(leaf.any() for leaf in jax.tree.leaves(RULE.init(unknown, 2, 3)))


@pytest.mark.parametrize("useful", (True, False))
def test_acceptance_is_met_where_costs_are_measured(target, draft, useful):
    """A draft that is the target begins with rates of 1, and one that is far from it with less."""
    model = target if useful else nearby_model(target, distance=3.0)
    measured = spsjax.request.Request(
        "test", target, PROMPTS, model, "auto", SamplingParams(), 20, 0, None, True
    )
    execution.prepare(measured)
    rates = np.asarray(measured.params["costs"].rates)
    assert rates.shape == (measured.program.drafter.num_speculative_tokens,)
    assert (rates > 0.98).all() if useful else 0 <= rates[0] < 0.6


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
        state = pacing.History(*np.sort(rng.random((4, 3, 4)) * 9, axis=0)[::-1])
        propose = np.cumsum([0, *rng.random(4) * rng.choice([0.1, 0.5, 2.0])])
        score = np.cumsum(rng.random(5) * [3, 1, 1, 1, 1])
        done = np.asarray([False, rng.random() < 0.5, rng.random() < 0.5])
        rates = np.asarray(RULE.rates(state), float)
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
        assert chosen(state, propose, score, done=done) == expected
        taken.add(best)
    assert len(taken) == 5


def test_scoring_passes_are_compiled_for_few_depths():
    assert pacing.scored_depths(0) == (0,)
    assert pacing.scored_depths(5) == (0, 1, 2, 4, 5)
    assert pacing.scored_depths(7) == (0, 1, 2, 4, 6, 7)
    assert pacing.scored_depths(30) == (0, 1, 2, 4, 6, 7, 11, 15, 23, 30)


def test_drafter_that_is_never_accepted_is_given_up_and_tried_again():
    """Of 400 rounds at most 2% of the time are lost, and the last tries are far apart."""
    propose, score = np.asarray([0, 0.2, 0.4, 0.6, 0.8]), np.ones(5)
    state, asked = after([]), []
    update, choose = jax.jit(RULE.update), jax.jit(RULE.depths)
    for _ in range(400):
        depth = choose(costs(propose, score), state, jnp.asarray([False]))
        state = update(None, state, depth, depth, jnp.zeros(1, jnp.int32))
        asked.append(int(depth[0]))
    lost = propose[asked].sum() / 400
    assert asked[0] > 0 and 0 < lost < 0.02
    late = np.flatnonzero(asked[100:])
    assert len(late) > 2 and np.diff(late).min() > 20


@pytest.mark.parametrize("name", drafting.NAMES)
def test_rounds_without_a_draft_lose_nothing(target, draft, name, monkeypatch):
    """After any number of them the next proposal is that of a drafter that never paused."""
    monkeypatch.setattr(waiting, "_ROOM", 32)  # so that some is read before the next draft
    if name == "none":
        pytest.skip("it never drafts")
    loaded = drafting.build(name, draft, K)
    verifier = drafting.verifier(name)
    pauses = dataclasses.replace(loaded.drafter.paced(), num_speculative_tokens=K)
    plain = decode.Program(target.config, loaded.drafter, verifier)
    paced = decode.Program(target.config, pauses, verifier, pacer=RULE)
    params = {"target": target.params, "drafter": loaded.params}
    tokens = np.zeros((4, 8), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in PROMPTS], np.int32)
    inputs = SamplingParams().rows(4), tokens, lengths, np.full(4, 170, np.int32)
    keys = sampling.row_keys(jax.random.key(1), 4)
    start = jax.jit(decode.prefill, static_argnums=(0, 1))
    state = start(paced, 192, params, *inputs, keys)
    run = jax.jit(functools.partial(decode.run, paced))

    @jax.jit
    def proposed(params, state):
        depths = decode.wanted_depths(paced, params, state)
        state = decode.caught_up(paced, params, state, depths)
        keys = decode.round_keys(state)
        return decode.propose(paced, params, state, keys, depths)[0], state.lengths

    @jax.jit
    def undisturbed(params, tokens, lengths):
        if name in drafting.WITH_HISTORY:
            return None
        inputs_now = SamplingParams().rows(4), tokens, lengths, np.full(4, 170, np.int32), keys
        state = decode.prefill(plain, 192, params, *inputs_now)
        return decode.propose(plain, params, state, decode.round_keys(state))[0]

    for depth, rounds in ((0, 1), (2, 1), (0, 3), (K, 2), (0, 40), (1, 1), (K, 1)):
        forced = params | {"costs": pacing.forced(depth, K)}
        # Rounds without a draft follow each other in a loop of their own.
        for count in [rounds] if depth == 0 else [1] * rounds:
            before = state
            proposal, _ = proposed(forced, state)
            if depth == 0:
                assert np.all(np.asarray(proposal.tokens) == -1)
            expected = undisturbed(params, state.tokens, state.lengths)
            if depth == K and expected is not None:
                np.testing.assert_array_equal(proposal.tokens, expected.tokens)
                if expected.probs is not None:
                    np.testing.assert_allclose(proposal.probs, expected.probs, atol=1e-4)
            state = run(forced, state, count)
            accepted = np.asarray(state.accepted) - np.asarray(before.accepted)
            assert not accepted[:, depth + 1 :].any()
            np.testing.assert_array_equal(state.rounds, before.rounds + count)
    assert not np.any(state.failed) and np.all(state.lengths > lengths + 45)


@dataclasses.dataclass(frozen=True)
class Sometimes(pacing.Pacer):
    """Drafts in one of four rounds, and in two of seven, of each row's own rounds."""

    def init(self, costs, batch, num_speculative_tokens):
        return jnp.zeros(batch, jnp.int32)

    def depths(self, costs, state, done_B):
        return jnp.where(done_B | (state % 4 != 1) & (state % 7 < 5), 0, 1 + state % K)

    def update(self, costs, state, asked_B, offered_B, accepted_B):
        return state + 1


@pytest.mark.parametrize("name", ("draft_model", "eagle", "hybrid", "random_tree"))
def test_loop_gives_what_its_rounds_give(target, draft, name):
    """Whether a row rests in a round of the loop of rests or in one like any other."""
    loaded, batch = drafting.build(name, draft, K), len(PROMPTS)
    verifier = drafting.verifier(name)
    program = decode.Program(target.config, loaded.drafter, verifier, pacer=Sometimes())
    params = {"target": target.params, "drafter": loaded.params, "costs": pacing.forced(-1, K)}
    tokens = np.tile(np.asarray([[3, 4, 5, 3]], np.int32), (batch, 1))
    lengths = np.asarray([4, 3, 4, 2], np.int32)
    limits = np.asarray([40, 30, 4, 36], np.int32)
    keys = sampling.row_keys(jax.random.key(2), batch)
    start = jax.jit(decode.prefill, static_argnums=(0, 1))
    state = start(program, 64, params, SamplingParams().rows(batch), tokens, lengths, limits, keys)
    step = jax.jit(functools.partial(decode.step, program))
    run = jax.jit(functools.partial(decode.run, program))
    one_by_one, states = state, []
    while not one_by_one.done.all():
        one_by_one = step(params, one_by_one)
        states.append(one_by_one)
    # Six rounds end between two drafts, eight between two rests.
    for count in (6, 8, len(states)):
        after, expected = run(params, state, count), states[count - 1]
        for field in ("lengths", "done", "failed", "rounds", "proposed", "accepted", "pace"):
            np.testing.assert_array_equal(getattr(after, field), getattr(expected, field))
        for row, length in enumerate(np.asarray(after.lengths)):
            np.testing.assert_array_equal(after.tokens[row, :length], expected.tokens[row, :length])
    histogram = np.asarray(one_by_one.accepted).sum(axis=0)
    assert histogram[0] > 20 and histogram[1:].sum() > 4


def test_calls_with_auto_give_the_targets_greedy_tokens(target, draft):
    expected = spsjax.generate(target, PROMPTS, sampling=GREEDY, max_new_tokens=40)
    for drafter in (draft, nearby_model(draft, seed=9, distance=30.0), ngram.Drafter()):
        out = spsjax.generate(target, PROMPTS, drafter, "auto", sampling=GREEDY, max_new_tokens=40)
        for tokens, others in zip(out.tokens, expected.tokens, strict=True):
            np.testing.assert_array_equal(tokens, others)
        assert len(out.stats.accepted_histogram) == 8


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
    spsjax.generate(target, PROMPTS, draft, "auto", max_new_tokens=20)
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


def test_costs_are_measured_on_whole_rounds_whatever_the_budget(target, draft):
    """A call without new tokens measures what a later call of the same buffers needs."""
    execution._COSTS.clear()
    rounds, before = [], execution._Clock._run

    def counted(clock, count):
        result = before(clock, count)
        rounds.append(result[1])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution._Clock, "_run", counted)
        spsjax.generate(target, [[1, 2]], draft, "auto", max_new_tokens=0, stop_at_eos=False)
    timed = rounds[2::3]
    assert min(timed) > 1 and max(timed) >= execution._LEAST_ROUNDS
    assert max(timed) <= execution._MOST_ROUNDS
    assert len(execution._COSTS) == 1
    execution._COSTS.clear()


def test_few_costs_are_kept(target, draft, monkeypatch):
    rest = pacing.forced(0, 7)
    monkeypatch.setattr(execution, "_measure", lambda call: execution.placed(call, rest))
    monkeypatch.setattr(execution, "_MOST_KEPT", 2)
    execution._COSTS.clear()
    for batch in range(1, 5):
        spsjax.generate(target, PROMPTS[:batch], draft, "auto", max_new_tokens=1)
    assert len(execution._COSTS) == 3
    execution._COSTS.clear()


@pytest.mark.parametrize(("name", "times"), [("draft_model", 1), ("hybrid", 2)])
def test_costs_are_measured_anew_for_other_sampling_where_drafts_vary(
    target, draft, monkeypatch, name, times
):
    measured, rest = [], pacing.forced(0, 7)
    monkeypatch.setattr(
        execution, "_measure", lambda call: measured.append(1) or execution.placed(call, rest)
    )
    execution._COSTS.clear()
    for temperature in (0.0, 1.0, 0.0):
        spsjax.generate(
            target,
            PROMPTS,
            drafting.build(name, draft, 4),
            "auto",
            SamplingParams(temperature),
            max_new_tokens=2,
        )
    execution._COSTS.clear()
    assert len(measured) == times


def test_costs_are_measured_on_half_of_the_prompts_with_keys_of_their_own(target, draft):
    """So that there is room, and the depths of a call's rounds do not depend on its own draws."""
    options = SamplingParams(), 4, 0, None, False
    call = spsjax.request.Request("x", target, [[1, 2, 3, 4, 5], [6]], draft, "auto", *options)
    clock = execution._Clock(call)
    clock._begin_if_ended()
    np.testing.assert_array_equal(clock.state.lengths, [3, 1])
    np.testing.assert_array_equal(clock.state.limits, [call.slots - 8] * 2)
    used = {tuple(key) for key in jax.random.key_data(clock.state.keys).tolist()}
    rounds = jax.vmap(jax.random.fold_in, (None, 0))
    for key in call.inputs[-1]:
        own = [key, *rounds(key, np.arange(call.slots))]
        assert used.isdisjoint(tuple(jax.random.key_data(one).tolist()) for one in own)
    state = clock.state
    clock._begin_if_ended()
    assert clock.state is state


@pytest.mark.parametrize("verifier", sorted(verifiers.NAMES))
def test_auto_with_every_verifier(target, draft, verifier, monkeypatch):
    """A round without a draft is one of plain decoding by any rule."""
    drafter, K = draft, 7
    if verifier in ("kseq", "multipath"):
        tree = spsjax.Tree.branching(2, replacement=True)
        drafter, K = spsjax.loading.as_drafter(draft, target, tree), 1
    rest = pacing.forced(0, K)
    monkeypatch.setattr(execution, "_measure", lambda call: execution.placed(call, rest))
    execution._COSTS.clear()
    out = spsjax.generate(
        target, PROMPTS, drafter, "auto", GREEDY, max_new_tokens=6, verifier=verifier
    )
    execution._COSTS.clear()
    assert out.stats.proposed_tokens == 0
    expected = spsjax.generate(target, PROMPTS, sampling=GREEDY, max_new_tokens=6)
    for tokens, others in zip(out.tokens, expected.tokens, strict=True):
        np.testing.assert_array_equal(tokens, others)


def test_costs_are_measured_once(target, draft):
    execution._COSTS.clear()
    first = spsjax.generate(target, PROMPTS, draft, "auto", max_new_tokens=20)
    (measured,) = execution._COSTS.values()
    again = spsjax.generate(target, PROMPTS, draft, "auto", max_new_tokens=20)
    assert first.stats.compile_seconds > 0 and again.stats.compile_seconds < 0.01
    assert (measured.propose[0], measured.least) == (0, 0)
    assert measured.score[0] > 0


def test_stream_and_trees_and_heads_take_auto(target, draft):
    tree = spsjax.Tree.branching(2, 1)
    trees = spsjax.loading.as_drafter(draft, target, tree)
    expected = spsjax.generate(target, PROMPTS[:1], sampling=GREEDY, max_new_tokens=12)
    for drafter in (trees, drafting.build("medusa", draft, 2), draft):
        _, rounds = spsjax.generation.rounds(
            target, PROMPTS[0], drafter, "auto", sampling=GREEDY, max_new_tokens=12
        )
        tokens = np.concatenate([round_.tokens for round_ in rounds])
        np.testing.assert_array_equal(tokens, expected.tokens[0])


def test_auto_on_eight_devices(target, draft, monkeypatch):
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
    options = {"sampling": GREEDY, "max_new_tokens": 300, "stop_at_eos": False}
    out = spsjax.generate(many[0], PROMPTS[:3], many[1], "auto", **options)
    expected = spsjax.generate(target, PROMPTS[:3], **options)
    for tokens, others in zip(out.tokens, expected.tokens, strict=True):
        np.testing.assert_array_equal(tokens, others)
    assert 1 <= sum(clocks) < len(clocks) / 2


@pytest.mark.parametrize("count", ["Auto", "4", -1, 2.0, True])
def test_odd_k_is_refused(target, draft, count):
    with pytest.raises(InputError, match='expected an integer >= 0, "auto" or "utility", found'):
        spsjax.generate(target, PROMPTS, draft, count, max_new_tokens=4)


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
        pacing.Fastest(**options)
