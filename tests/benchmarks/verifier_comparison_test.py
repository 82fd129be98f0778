"""What the comparison of verifiers measures, against distributions that are known."""

import jax
import numpy as np
import pytest
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

import spsjax
from spsjax import SamplingParams, Tree
from spsjax.benchmarks import acceptance_analysis, microbenchmarks, surprise, tree_planning
from spsjax.benchmarks import verifier_comparison as comparison
from spsjax.models import transformer

PROMPT = [1, 2, 3]
NUCLEUS = SamplingParams(0.8, top_p=0.95)


@pytest.fixture(scope="module")
def pair():
    target = numpy_spread_model(16)
    return target, numpy_nearby_model(target)


@pytest.fixture(scope="module")
def texts(pair):
    """Samples of the target: pairs of a prompt and its continuation."""
    out = spsjax.generate(
        pair[0], [PROMPT] * 12, sampling=NUCLEUS, max_new_tokens=40, stop_at_eos=False
    )
    return [(PROMPT, tokens.tolist()) for tokens in out.tokens]


def total(target, texts, params):
    return sum(
        (surprise.surprise(target, *text, params) for text in texts),
        start=surprise.Surprise(0.0, 0.0, 0, 0),
    )


def test_probable_texts_are_less_surprising_than_samples(pair, texts):
    """Texts of the greedy target, and of a colder one, are not samples at temperature 1."""
    target = pair[0]
    measured = total(target, texts, NUCLEUS)  # of samples
    assert measured.impossible == 0 and measured.tokens == 12 * 40
    assert abs(measured.score) < 3
    for params in (SamplingParams(0.0), SamplingParams(0.4)):
        out = spsjax.generate(
            target, [PROMPT] * 12, sampling=params, max_new_tokens=40, stop_at_eos=False
        )
        texts = [(PROMPT, tokens.tolist()) for tokens in out.tokens]
        assert total(target, texts, SamplingParams(1.0)).score < -5
    assert surprise.surprise(target, *texts[0], SamplingParams(0.0)).score is None
    assert total(target, texts, SamplingParams(0.0)).impossible > 0


@pytest.mark.slow
def test_surprise_is_that_of_the_distributions(pair):
    """Against a sum over single passes, in NumPy."""
    target, tokens, apply = pair[0], [5, 0, 9], jax.jit(transformer.apply, static_argnums=0)
    excess = variance = 0.0
    for size, token in enumerate(tokens):
        ids = np.asarray([[*PROMPT, *tokens[:size]]])
        scores = np.asarray(apply(target.config, target.params, ids).logits[0, -1], float) / 1.3
        logs = scores - np.logaddexp.reduce(scores)
        probs = np.exp(logs)
        excess -= logs[token] - probs @ logs
        variance += probs @ logs**2 - (probs @ logs) ** 2
    measured = surprise.surprise(target, PROMPT, tokens, SamplingParams(1.3))
    assert measured.excess == pytest.approx(excess, rel=1e-4)
    assert measured.variance == pytest.approx(variance, rel=1e-4)


@pytest.mark.slow
def test_rates_of_all_children_add_up_to_one(pair, texts):
    """Without replacement one of all 16 tokens is accepted; the first as a single draft token.

    A nucleus of the draft may lack tokens of the target's, which are then never drafted.
    """
    rates = tree_planning.child_rates(*pair, texts, SamplingParams(1.0), 16)
    assert rates.shape == (12, 16)
    np.testing.assert_allclose(rates.sum(axis=1), 1, atol=1e-3)
    rates = tree_planning.child_rates(*pair, texts, NUCLEUS, 2)
    assert np.all(rates.sum(axis=1) < 1)
    overlap = [acceptance_analysis.positions(*pair, *text, NUCLEUS).acceptance for text in texts]
    assert np.mean(rates[:, 0]) == pytest.approx(np.mean(overlap), abs=0.03)


def test_draft_of_a_smaller_vocabulary_has_rates_and_costs():
    target, small = numpy_spread_model(6), numpy_spread_model(4, seed=3)
    rates = tree_planning.child_rates(target, small, [(PROMPT, [5, 0, 4])], SamplingParams(1.0), 6)
    assert 0 < rates.sum() < 1 + 1e-3 and np.all(rates[0, 4:] == 0)


def test_costs_are_measured_for_every_number_of_tokens(pair):
    timers = {n: microbenchmarks.scoring_timer(pair[0], n, NUCLEUS, 20) for n in (1, 3)}
    costs = microbenchmarks.median_times(timers, 2)
    assert set(costs) == {1, 3} and all(seconds > 0 for seconds in costs.values())


@pytest.mark.slow
def test_expected_tokens_are_those_that_the_loop_emits(pair):
    """Greedy rows are not random, so that both are equal; the budget cuts the last round."""
    target = pair[0]
    chain, _, *trees = comparison.drafts(*pair, [0.7, 0.2], 5, levels=3, longest_chain=5)
    for kind in (chain, *trees):  # they have all rules of the kind that is left out
        greedy = SamplingParams(0.0)
        expected = comparison.expected_tokens(target, kind, PROMPT, greedy, 24, seed=0)
        assert expected.shape[1] == len(kind.rules)
        out = spsjax.generate(
            target, [PROMPT], kind.drafter, None, greedy, 24, verifier=kind.rules[0],
            stop_at_eos=False,
        )  # fmt: skip
        assert len(expected) == out.stats.target_calls
        assert np.all(expected == expected[:, :1])  # greedy rows leave no choice to the rules
        assert expected[:-1, 0].sum() <= 24 <= expected[:, 0].sum() + 1e-3


def test_kinds_of_drafts_have_as_many_tokens(pair):
    kinds = comparison.drafts(*pair, [0.7, 0.2], 6, levels=3, longest_chain=4)
    assert [kind.name for kind in kinds] == ["tree", "independent tree", "dynamic tree", "paths"]
    assert {kind.num_nodes for kind in kinds} == {6} and {kind.depth for kind in kinds} == {3}
    assert isinstance(kinds[0].drafter.drafter.tree, Tree)
    (chain,) = comparison.drafts(*pair, [0.7, 0.2], 3, levels=3, longest_chain=4)
    assert chain.name == "chain" and chain.num_nodes == chain.depth == 3
