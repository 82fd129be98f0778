"""Tests of the closed forms, against published numbers and brute force."""

import itertools

import numpy as np
import pytest
from helpers.bad_input import one_line

from spsjax.planning import theory

# Best K and its speed-up, by acceptance and cost of a draft step (Leviathan et al. 2022, 3.5).
BEST = {
    0.5: {0.01: (5, 1.88), 0.02: (4, 1.79), 0.05: (3, 1.63), 0.1: (2, 1.46), 0.2: (1, 1.25)},
    0.7: {0.01: (9, 2.97), 0.02: (8, 2.76), 0.05: (6, 2.35), 0.1: (4, 1.98), 0.2: (3, 1.58)},
    0.8: {0.01: (14, 4.23), 0.02: (11, 3.82), 0.05: (8, 3.09), 0.1: (6, 2.47), 0.2: (4, 1.87)},
    0.9: {0.01: (24, 7.49), 0.02: (19, 6.37), 0.05: (13, 4.67), 0.1: (10, 3.43), 0.2: (7, 2.37)},
}


@pytest.mark.parametrize("acceptance", BEST)
def test_best_num_speculative_tokens_matches_paper(acceptance):
    for cost, (count, speed) in BEST[acceptance].items():
        best, speedup = theory.best_num_speculative_tokens(acceptance, cost)
        assert (best, round(speedup, 2)) == (count, speed)


def test_operations_matches_paper():
    """At rate 0.8 and K = 5, there are 1.63 times as many operations and 3.69 times fewer calls."""
    assert round(theory.operations(0.8, 5, 0.0), 2) == 1.63
    assert round(theory.block_efficiency(0.8, 5), 2) == 3.69
    # By hand: 2 draft tokens and 3 target tokens for 1 + 1/2 + 1/4 tokens.
    assert theory.operations(0.5, 2, 0.1) == pytest.approx((2 * 0.1 + 3) / 1.75)


@pytest.mark.parametrize(  # HumanEval, XSum, GPT-2 XL
    ("share", "target_ms", "draft_ms", "speed"),
    [(0.8, 14.1, 1.8, 2.65), (0.62, 14.1, 1.8, 2.05), (0.8125, 73.3, 11.9, 2.46)],
)
def test_speedup_matches_published_shares(share, target_ms, draft_ms, speed):
    """r' (K + 1) t_target / (K t_draft + t_target), K = 4, r' = tokens per round / (K + 1)."""
    rate = theory.rate_of(share * 5, 4)
    assert theory.block_efficiency(rate, 4) == pytest.approx(5 * share)
    assert round(theory.speedup(rate, 4, draft_ms / target_ms), 2) == speed


@pytest.mark.parametrize(("ms", "rate"), [(7.52, 0.71), (7.00, 0.75), (5.73, 0.85)])
def test_rate_of_matches_times_of_chen_et_al(ms, rate):
    """Table 1 gives times per token. A round of its loop takes 14.1 + 4 x 1.8 ms."""
    assert round(theory.rate_of((14.1 + 4 * 1.8) / ms, 4), 2) == pytest.approx(rate, abs=0.011)


def test_acceptance_matches_the_rule_and_total_variation():
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet(np.full(7, 0.4), (2, 200))
    rule = draft * np.minimum(1, target / np.maximum(draft, 1e-300))
    for expected in (rule.sum(-1), 1 - 0.5 * np.abs(target - draft).sum(-1)):
        np.testing.assert_allclose(theory.acceptance(target, draft), expected, rtol=0, atol=1e-12)
    strict, lenient = (theory.acceptance(target, draft, lenience) for lenience in (1.0, 0.5))
    assert np.all(lenient >= strict) and np.any(lenient > strict) and np.all(lenient <= 1 + 1e-12)


def test_block_efficiency_matches_enumeration_of_a_round():
    rates, K = [0.9, 0.5, 0.75, 0.1], 4
    expected = 0.0
    for outcome in itertools.product((True, False), repeat=K):
        chance = np.prod([rate if yes else 1 - rate for rate, yes in zip(rates, outcome)])
        accepted = next((i for i, yes in enumerate(outcome) if not yes), K)
        expected += chance * (accepted + 1)
    assert theory.block_efficiency(rates, K) == pytest.approx(expected)
    assert theory.block_efficiency([0.6] * 3, 3) == pytest.approx(theory.block_efficiency(0.6, 3))


def test_theory_at_ends_of_the_range():
    assert theory.block_efficiency(0.0, 5) == 1 and theory.block_efficiency(1.0, 5) == 6
    assert theory.block_efficiency(0.7, 0) == 1 and theory.speedup(0.7, 0, 0.1) == 1
    assert theory.best_num_speculative_tokens(0.1, 0.2) == (0, 1.0)
    assert theory.best_num_speculative_tokens([0.9, 0.1], 0.05) == (1, pytest.approx(1.9 / 1.05))
    assert theory.best_num_speculative_tokens(1.0, 0.01, most=40)[0] == 40
    for K in (1, 4, 30):
        assert theory.rate_of(1, K) == pytest.approx(0)
        assert theory.rate_of(K + 1, K) == pytest.approx(1)
        assert theory.rate_of(theory.block_efficiency(0.3, K), K) == pytest.approx(0.3)


def test_best_k_with_scoring_cost_is_smaller():
    free, _ = theory.best_num_speculative_tokens(0.8, 0.05)
    costly, speed = theory.best_num_speculative_tokens(0.8, 0.05, lambda K: 1 + 0.15 * K)
    assert costly < free
    assert speed == pytest.approx(theory.speedup(0.8, costly, 0.05, 1 + 0.15 * costly))


def test_theory_refuses_bad_rates():
    with one_line("acceptance", "1.2"):
        theory.block_efficiency(1.2, 3)
    with one_line("acceptance", "3 rates", "found 2"):
        theory.speedup([0.5, 0.5], 3, 0.1)
    with one_line("block_efficiency", "[1, 5]", "5.5"):
        theory.rate_of(5.5, 4)
