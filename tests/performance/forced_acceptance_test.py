"""Forced acceptance, which times a pair without trained weights."""

import jax
import jax.numpy as jnp
import pytest

import spsjax
from spsjax import sampling
from spsjax.performance import forced_acceptance


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 1.0), (0.8, 2.44), (1.0, 3.0)])
def test_as_many_tokens_are_emitted_as_the_rate_says(acceptance, expected):
    """The mean is 1 + a + a^2 for two draft tokens, although the pair agrees on nothing."""
    B, V = 4000, 4
    keys = sampling.row_keys(jax.random.key(0), B)
    one_hot = jnp.tile(jax.nn.one_hot(0, V), (B, 3, 1))
    proposal = spsjax.Proposal(jnp.ones((B, 2), jnp.int32), jnp.roll(one_hot[:, :2], 1, axis=-1))
    verdict = forced_acceptance.Verifier(acceptance).verify(keys, proposal, one_hot)
    assert float(jnp.mean(verdict.num_tokens)) == pytest.approx(expected, abs=0.05)
    assert bool(jnp.all(verdict.valid))
    nothing = spsjax.Proposal(jnp.full((B, 2), -1), None)
    verdict = forced_acceptance.Verifier(acceptance).verify(keys, nothing, one_hot)
    assert set(verdict.num_tokens.tolist()) == {1}


@pytest.mark.parametrize("acceptance", (-0.1, 1.5, float("nan"), True, "0.8"))
def test_other_rates_are_refused(acceptance):
    with pytest.raises(spsjax.InputError, match=r"^acceptance: expected a number in "):
        forced_acceptance.Verifier(acceptance)
