"""K by trial: `pacing.Utility`, with the costs of a simulated mixture of experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import tiny_config

import spsjax
from spsjax import execution, loading, pacing, request
from spsjax.models import experts, transformer
from spsjax.performance import mixtures

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


@functools.partial(jax.jit, static_argnums=(0, 4))
def played(pacer, costs, rate, key, rounds):
    """Returns the depths [rounds] and accepted tokens [rounds] of one row."""

    def one(state, key):
        asked = pacer.depths(costs, state, jnp.zeros(1, bool))
        good = jax.random.uniform(key, (K,)) < rate
        accepted = jnp.minimum(jnp.sum(jnp.cumprod(good))[None], asked)
        return pacer.update(costs, state, asked, asked, accepted), (asked[0], accepted[0])

    return jax.lax.scan(one, pacer.init(None, 1, K), jax.random.split(key, rounds))[1]


def time_per_token(costs, asked, accepted):
    asked = np.asarray(asked)
    return float((costs.propose + costs.score)[asked].sum() / (np.asarray(accepted) + 1).sum())


def of_fixed(costs, rate):
    """Returns the expected time per token of each compiled depth."""
    tokens = {depth: sum(rate**i for i in range(depth + 1)) for depth in DEPTHS}
    return {k: float(costs.propose[k] + costs.score[k]) / tokens[k] for k in DEPTHS}


@pytest.mark.parametrize("rule", (pacing.Utility(), pacing.Fastest()), ids=("utility", "fastest"))
@pytest.mark.parametrize("skew", (0.0, 1.0, 2.0))
@pytest.mark.parametrize("rate", (0.0, 0.5, 0.9))
def test_a_mixture_is_hardly_slower_than_without_drafts_and_near_the_best_depth(rule, rate, skew):
    costs = mixture_costs(64, 4, skew)
    asked, accepted = played(rule, costs, rate, jax.random.key(1), 4000)
    found, fixed = time_per_token(costs, asked, accepted), of_fixed(costs, rate)
    assert found <= 1.05 * fixed[0]
    assert found <= 1.10 * min(fixed.values())


def test_drafts_that_are_never_accepted_are_given_up():
    costs = mixture_costs(64, 4, 0.0)
    asked, _ = played(pacing.Utility(), costs, 0.0, jax.random.key(0), 2000)
    assert np.mean(np.asarray(asked) > 0) < 0.06
    assert np.asarray(asked)[-600:].max() > 0  # it is tried again


def test_verification_that_costs_more_than_it_yields_is_left_out():
    """Three quarters are accepted, but each token of the pass reads experts of its own."""
    costs = mixture_costs(1024, 8, 0.0, fixed=0.0)
    assert min(of_fixed(costs, 0.75), key=of_fixed(costs, 0.75).get) == 0
    asked, _ = played(pacing.Utility(), costs, 0.75, jax.random.key(0), 1500)
    assert np.mean(np.asarray(asked) == 0) > 0.8


def test_a_phase_climbs_while_the_utility_grows_and_keeps_the_best():
    """With everything accepted and free passes, the trials go up to the longest chain."""
    free = pacing.Costs(np.zeros(K + 1, np.float32), np.ones(K + 1, np.float32), np.int32(0))
    rule = pacing.Utility(trial=2, keep=5)
    asked, _ = played(rule, free, 1.0, jax.random.key(0), 15)
    climb = [depth for depth in DEPTHS[2:] for _ in range(2)]
    expected = [*climb, *[K] * 5, *[K] * 2, *[DEPTHS[-2]] * 2]
    assert np.asarray(asked).tolist() == expected[:15]


def test_a_phase_that_finds_nothing_better_above_looks_below():
    """One token is always accepted, and never a second one."""
    score = np.asarray([1, 1.1, 1.6, 2, 3, 4, 5, 6], np.float32)
    costs = pacing.Costs(np.zeros(K + 1, np.float32), score, np.int32(0))
    rule, asked = pacing.Utility(trial=1, keep=4), []
    state = rule.init(None, 1, K)
    for _ in range(9):
        (depth,) = rule.depths(costs, state, jnp.asarray([False])).tolist()
        asked.append(depth)
        state = rule.update(costs, state, *(jnp.asarray([n]) for n in (depth, depth, depth and 1)))
    assert asked == [2, 4, 1, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("seed", range(6))
def test_deep_chains_are_found_where_short_ones_do_not_pay(seed):
    """A draft takes as long as a pass, however deep it is: at a rate of 0.7 only deep ones pay."""
    propose = np.asarray([0, *[1] * K], np.float32)
    costs = pacing.Costs(propose, np.ones(K + 1, np.float32), np.int32(0))
    asked, accepted = played(pacing.Utility(), costs, 0.7, jax.random.key(seed), 6000)
    late = slice(3000, None)
    assert min(of_fixed(costs, 0.7).values()) < 0.65
    assert time_per_token(costs, asked[late], accepted[late]) < 0.9  # a trial can be unlucky


def test_a_round_without_a_proposal_costs_what_it_scored():
    """As of a look-up that found nothing: the utility is that of plain decoding, not less."""
    score = np.arange(1, K + 2, dtype=np.float32)
    costs = pacing.Costs(np.zeros(K + 1, np.float32), score, np.int32(0))
    rule = pacing.Utility(trial=2, keep=5)
    state, none = rule.init(None, 1, K), jnp.zeros(1, jnp.int32)
    for _ in range(2):
        asked = rule.depths(costs, state, jnp.asarray([False]))
        assert asked[0] > 0
        state = rule.update(costs, state, asked, none, none)
    assert float(state.utility[0]) == pytest.approx(1)


def test_rows_that_are_done_learn_nothing(target, draft):
    """A row goes on with what it knew, however long it was empty before the next text."""
    greedy = spsjax.SamplingParams(temperature=0.0)
    arguments = [[3, 4], [5, 6]], draft, "utility", greedy, [4, 60], 0, None, False
    call = request.Request("test", target, *arguments)
    call.params["costs"] = execution.placed(call, mixture_costs(16, 2, 0.0))
    state, _ = execution.prefill(call)
    pace = []
    while not np.asarray(state.done).all():
        state, _ = execution.run(call, state, 2)
        if state.done[0]:
            pace.append(jax.tree.map(lambda leaf: np.asarray(leaf)[0].tolist(), state.pace))
    assert len(pace) > 5 and all(one == pace[0] for one in pace)


@pytest.mark.parametrize("seed", range(3))
def test_rows_decide_for_themselves(seed):
    """A row among others is drafted as deep as one alone, and one that is done not at all."""
    rule, rng = pacing.Utility(trial=2, keep=3), np.random.default_rng(seed)
    costs = mixture_costs(16, 2, 0.5)
    together, alone = rule.init(None, 3, K), rule.init(None, 1, K)
    for _ in range(60):
        asked = rule.depths(costs, together, jnp.asarray([False, True, False]))
        assert asked[1] == 0
        np.testing.assert_array_equal(asked[2:], rule.depths(costs, alone, jnp.asarray([False])))
        accepted = jnp.minimum(jnp.asarray(rng.integers(0, K + 1, 3)), asked)
        together = rule.update(costs, together, asked, asked, accepted)
        alone = rule.update(costs, alone, asked[2:], asked[2:], accepted[2:])


def test_calls_take_a_rule_by_name_or_as_it_is(target, draft):
    greedy = spsjax.SamplingParams(temperature=0.0)
    options = {"sampling": greedy, "max_new_tokens": 20, "stop_at_eos": False}
    plain = spsjax.generate(target, [[3, 4, 5]], **options)
    for rule in ("utility", pacing.Utility(trial=1, keep=2)):
        out = spsjax.generate(target, [[3, 4, 5]], draft, rule, **options)
        np.testing.assert_array_equal(out.tokens[0], plain.tokens[0])
    with pytest.raises(spsjax.InputError, match=r"^num_speculative_tokens: .*utility"):
        spsjax.generate(target, [[3]], draft, "useful")
    for wrong in (0, 2**16, 1.5):
        with pytest.raises(spsjax.InputError, match=r"^trial: expected"):
            pacing.Utility(trial=wrong)
    engine = spsjax.Engine(target, draft, "utility", rows=2, slots=64, stop_at_eos=False)
    requests = [engine.submit([3, 4, 5], greedy, 20, seed) for seed in range(3)]
    for one in requests:
        np.testing.assert_array_equal(one.result(), plain.tokens[0])


@pytest.mark.parametrize("skew", (0.0, 2.0))
def test_routers_prefer_the_first_experts_as_much_as_is_asked(skew, monkeypatch):
    """Counted over random tokens."""
    config = tiny_config(512, d_model=64, num_layers=2, num_experts=8, experts_per_token=1)
    model = mixtures.with_skew(loading.random(config, dtype=jnp.float32), skew)
    counts = []

    def counted(config, x, chosen, weights, kernels):
        counts.append(np.asarray(chosen).reshape(-1, 8).mean(axis=0))
        return jnp.zeros_like(x)

    monkeypatch.setattr(experts, "mixture", counted)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 64))
    transformer.apply(config, model.params, tokens)
    for share in counts:
        assert share[:2].sum() > 0.9 if skew else share[:2].sum() < 0.6
    with pytest.raises(spsjax.InputError, match=r"^router_skew: .*expected a mixture"):
        mixtures.with_skew(loading.random(tiny_config(48)), 1.0)


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
