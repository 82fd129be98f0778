"""K by trial: `pacing.Utility`, with the costs of a simulated mixture of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model, tiny_config
from helpers.numpy_models import numpy_nearby_model, numpy_params, numpy_spread_model

import spsjax
from spsjax import execution, pacing, request
from spsjax.drafters import base
from spsjax.models import experts, transformer
from spsjax.performance import mixtures
from spsjax.utils.compilation import compiled

K = 7
DEPTHS = pacing.scored_depths(K)


def mixture_costs(num_experts, per_token, skew, fixed=0.3, draft=0.05):
    """Returns costs of a mixture whose pass takes as long as it reads, `fixed` of it no expert."""
    shares = mixtures.popularity(num_experts, per_token, skew)
    read = [mixtures.distinct_experts(shares, depth + 1) / per_token for depth in range(K + 1)]
    score = fixed + (1 - fixed) * np.asarray(read)
    return pacing.Costs(
        (draft * np.arange(K + 1)).astype(np.float32), score.astype(np.float32), np.int32(0)
    )


def play(pacer, rounds, costs, rates, keys):
    """Returns depths [N, rounds] and accepted tokens [N, rounds] of N rows that run alone."""

    def row(rate, key):
        def one(state, key):
            asked = pacer.depths(costs, state, jnp.zeros(1, bool))
            good = jax.random.uniform(key, (K,)) < rate
            accepted = jnp.minimum(jnp.sum(jnp.cumprod(good))[None], asked)
            return pacer.update(costs, state, asked, asked, accepted), (asked[0], accepted[0])

        return jax.lax.scan(one, pacer.init(None, 1, K), jax.random.split(key, rounds))[1]

    return jax.vmap(row)(rates, keys)


def played(pacer, costs, rates, seed, rounds):
    """Returns depths and accepted tokens of a row per rate."""
    rates = np.asarray(rates, np.float32)
    keys = jax.random.split(jax.random.key(seed), len(rates))
    asked, accepted = compiled(play, pacer, rounds)(costs, rates, keys)[0]
    return np.asarray(asked), np.asarray(accepted)


def asks(rule, costs, state, done) -> list[int]:
    return compiled(type(rule).depths, rule)(costs, state, np.asarray(done))[0].tolist()


def learnt(rule, costs, state, *counts):
    return compiled(type(rule).update, rule)(costs, state, *map(np.int32, counts))[0]


def time_per_token(costs, asked, accepted):
    asked = np.asarray(asked)
    return float((costs.propose + costs.score)[asked].sum() / (np.asarray(accepted) + 1).sum())


def of_fixed(costs, rate):
    """Returns the expected time per token of each compiled depth."""
    tokens = {depth: sum(rate**i for i in range(depth + 1)) for depth in DEPTHS}
    return {k: float(costs.propose[k] + costs.score[k]) / tokens[k] for k in DEPTHS}


@pytest.mark.parametrize("rule", (pacing.Utility(), pacing.Fastest()), ids=("utility", "fastest"))
@pytest.mark.parametrize("skew", (0.0, 1.0, 2.0))
def test_a_mixture_is_hardly_slower_than_without_drafts_and_near_the_best_depth(rule, skew):
    costs, rates = mixture_costs(64, 4, skew), (0.0, 0.5, 0.9)
    for rate, asked, accepted in zip(rates, *played(rule, costs, rates, 1, 4000)):
        found, fixed = time_per_token(costs, asked, accepted), of_fixed(costs, rate)
        assert found <= 1.05 * fixed[0], rate
        assert found <= 1.10 * min(fixed.values()), rate


def test_drafts_that_do_not_pay_are_given_up():
    """Those that are never accepted, and those that read more experts than they yield tokens."""
    (asked,), _ = played(pacing.Utility(), mixture_costs(64, 4, 0.0), [0.0], 0, 2000)
    assert np.mean(asked > 0) < 0.06
    assert asked[-600:].max() > 0  # it is tried again
    costs = mixture_costs(1024, 8, 0.0, fixed=0.0)
    assert min(of_fixed(costs, 0.75), key=of_fixed(costs, 0.75).get) == 0
    (asked,), _ = played(pacing.Utility(), costs, [0.75], 0, 2000)
    assert np.mean(asked == 0) > 0.8


def test_a_phase_climbs_while_the_utility_grows_and_keeps_the_best():
    """With everything accepted and free passes, the trials go up to the longest chain."""
    free = pacing.Costs(np.zeros(K + 1, np.float32), np.ones(K + 1, np.float32), np.int32(0))
    rule = pacing.Utility(trial=2, keep=5)
    (asked,), _ = played(rule, free, [1.0], 0, 2000)
    climb = [depth for depth in DEPTHS[2:] for _ in range(2)]
    expected = [*climb, *[K] * 5, *[K] * 2, *[DEPTHS[-2]] * 2]
    assert asked[:15].tolist() == expected[:15]


def test_a_phase_that_finds_nothing_better_above_looks_below():
    """One token is always accepted, and never a second one."""
    score = np.asarray([1, 1.1, 1.6, 2, 3, 4, 5, 6], np.float32)
    costs = pacing.Costs(np.zeros(K + 1, np.float32), score, np.int32(0))
    rule, asked = pacing.Utility(trial=1, keep=4), []
    state = rule.init(None, 1, K)
    for _ in range(9):
        (depth,) = asks(rule, costs, state, [False])
        asked.append(depth)
        state = learnt(rule, costs, state, [depth], [depth], [depth and 1])
    assert asked == [2, 4, 1, 1, 1, 1, 1, 1, 2]


def test_deep_chains_are_found_where_short_ones_do_not_pay():
    """A draft takes as long as a pass, however deep it is: at a rate of 0.7 only deep ones pay."""
    propose = np.asarray([0, *[1] * K], np.float32)
    costs = pacing.Costs(propose, np.ones(K + 1, np.float32), np.int32(0))
    assert min(of_fixed(costs, 0.7).values()) < 0.65
    late = slice(3000, None)
    for asked, accepted in zip(*played(pacing.Utility(), costs, [0.7] * 6, 0, 6000)):
        assert time_per_token(costs, asked[late], accepted[late]) < 0.9  # a trial can be unlucky


def test_a_round_without_a_proposal_costs_what_it_scored():
    """As of a look-up that found nothing: the utility is that of plain decoding, not less."""
    score = np.arange(1, K + 2, dtype=np.float32)
    costs = pacing.Costs(np.zeros(K + 1, np.float32), score, np.int32(0))
    rule = pacing.Utility(trial=2, keep=5)
    state = rule.init(None, 1, K)
    for _ in range(2):
        asked = asks(rule, costs, state, [False])
        assert asked[0] > 0
        state = learnt(rule, costs, state, asked, [0], [0])
    assert float(state.utility[0]) == pytest.approx(1)


@pytest.fixture
def chain(draft, monkeypatch):
    """A drafter of chains of at most two tokens, of which few depths are compiled."""
    monkeypatch.setattr(base, "PACED_TOKENS", 2)
    return drafting.build("draft_model", draft, 2)


@pytest.mark.slow
def test_rows_that_are_done_learn_nothing(target, chain):
    """A row goes on with what it knew, however long it was empty before the next text."""
    greedy = spsjax.SamplingParams(temperature=0.0)
    arguments = [[3, 4], [5, 6]], chain, "utility", greedy, [4, 60], 0, None, False
    call = request.Request("test", target, *arguments)
    score = np.asarray([1, 1.2, 1.4], np.float32)
    call.params["costs"] = execution.placed(call, pacing.Costs(0 * score, score, np.int32(0)))
    state, _ = execution.prefill(call)
    pace = []
    while not np.asarray(state.done).all():
        state, _ = execution.run(call, state, 2)
        if state.done[0]:
            pace.append(jax.tree.map(lambda leaf: np.asarray(leaf)[0].tolist(), state.pace))
    assert len(pace) > 5 and all(one == pace[0] for one in pace)


def test_rows_decide_for_themselves():
    """A row among others is drafted as deep as one alone, and one that is done not at all."""
    rule, rng = pacing.Utility(trial=2, keep=3), np.random.default_rng(0)
    costs = mixture_costs(16, 2, 0.5)
    together, alone = rule.init(None, 3, K), rule.init(None, 1, K)
    for _ in range(180):
        asked = asks(rule, costs, together, [False, True, False])
        assert asked[1] == 0
        assert asked[2:] == asks(rule, costs, alone, [False])
        accepted = np.minimum(rng.integers(0, K + 1, 3), asked)
        together = learnt(rule, costs, together, asked, asked, accepted)
        alone = learnt(rule, costs, alone, asked[2:], asked[2:], accepted[2:])


@pytest.mark.slow
def test_calls_take_a_rule_by_name_or_as_it_is(target, chain):
    """Other numbers of a rule need no other program."""
    greedy = spsjax.SamplingParams(temperature=0.0)
    options = {"sampling": greedy, "max_new_tokens": 20, "stop_at_eos": False}
    plain = spsjax.generate(target, [[3, 4, 5]], **options)
    for rule in ("utility", pacing.Utility(trial=1, keep=2)):
        out = spsjax.generate(target, [[3, 4, 5]], chain, rule, **options)
        np.testing.assert_array_equal(out.tokens[0], plain.tokens[0])


def test_engine_takes_a_rule_by_name():
    """How it runs one is in engine_test."""
    target = numpy_spread_model(48)
    draft = numpy_nearby_model(target)
    engine = spsjax.Engine(target, draft, "utility", rows=2, slots=64)
    assert engine._program.pacer == pacing.Utility()


def test_rules_that_cannot_be_used_are_refused():
    target = numpy_spread_model(48)
    with pytest.raises(spsjax.InputError, match=r"^num_speculative_tokens: .*utility"):
        spsjax.generate(target, [[3]], target, "useful")
    for wrong in (0, 2**16, 1.5):
        with pytest.raises(spsjax.InputError, match=r"^trial: expected"):
            pacing.Utility(trial=wrong)


@pytest.mark.parametrize("skew", (0.0, 2.0))
def test_routers_prefer_the_first_experts_as_much_as_is_asked(skew, monkeypatch):
    """Counted over random tokens."""
    config = tiny_config(512, d_model=64, num_layers=2, num_experts=8, experts_per_token=1)
    model = build_model(config, numpy_params(config, 0), None)
    model = mixtures.with_skew(model, skew)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 64))

    @jax.jit
    def shares(params):
        counts = []

        def counted(config, x, chosen, weights, kernels):
            counts.append(chosen.reshape(-1, 8).mean(axis=0))
            return jnp.zeros_like(x)

        monkeypatch.setattr(experts, "mixture", counted)
        transformer.apply(config, params, tokens)
        return counts

    counts = shares(model.params)
    assert len(counts) == 2
    first = np.asarray(counts)[:, :2].sum(axis=1).mean()
    assert first > 0.85 if skew else first < 0.6
    with pytest.raises(spsjax.InputError, match=r"^router_skew: .*expected a mixture"):
        mixtures.with_skew(numpy_spread_model(48), 1.0)


def test_distinct_experts_are_those_of_independent_choices():
    """Against draws of tokens, whose every expert is chosen or not by itself."""
    shares = mixtures.popularity(8, 2, 1.0)
    assert shares.sum() == pytest.approx(2) and (np.diff(shares) <= 0).all() and shares[0] <= 1
    drawn = np.random.default_rng(0).random((20_000, 5, 8)) < shares
    expected = drawn.any(axis=1).sum(axis=1).mean()
    assert mixtures.distinct_experts(shares, 5) == pytest.approx(expected, abs=0.03)
    even = mixtures.popularity(8, 2)
    assert mixtures.distinct_experts(even, 5) == pytest.approx(8 * (1 - 0.75**5))
    assert mixtures.distinct_experts(even, 1) == pytest.approx(2)
    assert mixtures.popularity(4, 4, 3.0).tolist() == [1, 1, 1, 1]
    steep = mixtures.popularity(6, 3, 5.0)
    assert steep[:2].tolist() == [1, 1] and steep.sum() == pytest.approx(3)
