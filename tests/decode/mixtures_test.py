"""K chosen in every round where more tokens read more weights: mixtures of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import build_model, tiny_config
from helpers.numpy_models import numpy_params, numpy_spread_model

import spsjax
from spsjax import decode
from spsjax.models import experts, layer_stack, transformer
from spsjax.planning import mixtures
from spsjax.utils.compilation import compiled

K = 7
DEPTHS = decode.schedule.scored_depths(K)


def mixture_costs(num_experts, per_token, skew, fixed=0.3, draft=0.05):
    """Returns costs of a mixture whose pass takes as long as it reads, `fixed` of it no expert."""
    shares = mixtures.popularity(num_experts, per_token, skew)
    read = [mixtures.distinct_experts(shares, depth + 1) / per_token for depth in range(K + 1)]
    score = fixed + (1 - fixed) * np.asarray(read)
    propose = draft * np.arange(K + 1)
    return decode.schedule.Costs(propose.astype(np.float32), score.astype(np.float32))


def play(schedule, rounds, costs, rates, keys):
    """Returns depths [N, rounds] and accepted tokens [N, rounds] of N rows that run alone."""

    def row(rate, key):
        def one(state, key):
            asked = schedule.depths(costs, state, jnp.zeros(1, bool))
            good = jax.random.uniform(key, (K,)) < rate
            accepted = jnp.minimum(jnp.sum(jnp.cumprod(good))[None], asked)
            return schedule.update(state, asked, asked, accepted), (asked[0], accepted[0])

        return jax.lax.scan(one, schedule.init(None, 1, K), jax.random.split(key, rounds))[1]

    return jax.vmap(row)(rates, keys)


def played(schedule, costs, rates, seed, rounds):
    """Returns depths and accepted tokens of a row per rate."""
    rates = np.asarray(rates, np.float32)
    keys = jax.random.split(jax.random.key(seed), len(rates))
    asked, accepted = compiled(play, schedule, rounds)(costs, rates, keys)[0]
    return np.asarray(asked), np.asarray(accepted)


def time_per_token(costs, asked, accepted):
    asked = np.asarray(asked)
    return float((costs.propose + costs.score)[asked].sum() / (np.asarray(accepted) + 1).sum())


def of_fixed(costs, rate):
    """Returns the expected time per token of each compiled depth."""
    tokens = {depth: sum(rate**i for i in range(depth + 1)) for depth in DEPTHS}
    return {k: float(costs.propose[k] + costs.score[k]) / tokens[k] for k in DEPTHS}


@pytest.mark.parametrize("skew", (0.0, 1.0, 2.0))
def test_a_mixture_is_hardly_slower_than_without_drafts_and_near_the_best_depth(skew):
    costs, rates = mixture_costs(64, 4, skew), (0.0, 0.5, 0.9)
    for rate, asked, accepted in zip(
        rates, *played(decode.schedule.Fastest(), costs, rates, 1, 4000)
    ):
        actual, fixed = time_per_token(costs, asked, accepted), of_fixed(costs, rate)
        assert actual <= 1.05 * fixed[0], rate
        assert actual <= 1.10 * min(fixed.values()), rate


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
        # Jitted layers would hide what is counted.
        monkeypatch.setattr(layer_stack, "_equal_block", layer_stack._block)
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
