"""Forced acceptance, which times a pair without trained weights."""

import numpy as np
import pytest
from helpers.verdicts import verdict_of

import spsjax
from spsjax.benchmarks import forced_acceptance


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 1.0), (0.8, 2.44), (1.0, 3.0)])
def test_as_many_tokens_are_emitted_as_the_rate_says(acceptance, expected):
    """The mean is 1 + a + a^2 for two draft tokens, although the pair agrees on nothing."""
    B, V = 4000, 4
    rule, target = forced_acceptance.Verifier(acceptance), np.zeros((B, 3, V), np.float32)
    target[..., 0] = 1
    draft = np.roll(target[:, :2], 1, axis=-1)
    verdict = verdict_of(rule, spsjax.Proposal(np.ones((B, 2), np.int32), draft), target)
    assert np.mean(verdict.num_tokens) == pytest.approx(expected, abs=0.05)
    assert verdict.valid.all()
    nothing = spsjax.Proposal(np.full((B, 2), -1, np.int32), None)
    assert set(verdict_of(rule, nothing, target).num_tokens.tolist()) == {1}


@pytest.mark.parametrize("acceptance", (1.5, float("nan"), True))
def test_other_rates_are_refused(acceptance):
    with pytest.raises(spsjax.InputError, match=r"^acceptance: expected a number in "):
        forced_acceptance.Verifier(acceptance)
