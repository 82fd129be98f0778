"""Losses against plain NumPy in float64, and gradients that training can use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax import losses

RNG = np.random.default_rng(0)
TARGET, DRAFT = (RNG.normal(0, 3, (2, 5, 11)) for _ in range(2))
LABELS = RNG.integers(0, 11, (2, 5))


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


target_probs, draft_probs = softmax(TARGET), softmax(DRAFT)
KL = (target_probs * np.log(target_probs / draft_probs)).sum(-1)
OVERLAP = np.minimum(target_probs, draft_probs).sum(-1)
VARIATION = 0.5 * np.abs(target_probs - draft_probs).sum(-1)
EXPECTED = {
    "forward_kl": KL,
    "acceptance": OVERLAP,
    "total_variation": VARIATION,
    "lk_hybrid": np.exp(-3 * OVERLAP) * KL + (1 - np.exp(-3 * OVERLAP)) * VARIATION,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_divergence_is_what_numpy_gives(name):
    np.testing.assert_allclose(getattr(losses, name)(TARGET, DRAFT), EXPECTED[name], atol=2e-6)


def test_cross_entropy_is_what_numpy_gives():
    rows, columns = np.indices(LABELS.shape)
    expected = -np.log(draft_probs[rows, columns, LABELS])
    np.testing.assert_allclose(losses.cross_entropy(DRAFT, LABELS), expected, atol=2e-6)


def test_every_distillation_objective_is_tested_here():
    assert losses.DIVERGENCES.keys() <= EXPECTED.keys()


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_a_draft_equal_to_the_target_has_no_divergence_and_no_gradient(name):
    loss = losses.DIVERGENCES[name]
    target = jnp.asarray(TARGET, jnp.float32)
    value, gradient = jax.value_and_grad(lambda draft: loss(target, draft).sum())(target)
    assert abs(value) < 1e-5
    if name == "forward_kl":  # the others have a kink there
        assert jnp.abs(gradient).max() < 1e-6


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_a_step_along_the_gradient_brings_the_draft_nearer(name):
    loss = losses.DIVERGENCES[name]
    target, draft = jnp.asarray(TARGET), jnp.asarray(DRAFT)
    for _ in range(50):
        draft -= 0.3 * jax.grad(lambda draft: loss(target, draft).sum())(draft)
    after = losses.acceptance(target, draft).mean()
    assert after > losses.acceptance(target, DRAFT).mean() + 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*losses.DIVERGENCES, "acceptance"])
def test_far_apart_logits_give_finite_values_and_gradients(name, dtype):
    target = jnp.asarray([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], dtype)
    draft = jnp.asarray([[-1e4, 0.0, 1e4], [200.0, 0.0, 0.0]], dtype)
    loss = getattr(losses, name)
    value, gradient = jax.value_and_grad(lambda draft: loss(target, draft).sum())(draft)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
    assert value.dtype == jnp.float32  # whatever the logits are


def test_the_hybrid_weight_has_no_gradient():
    target, draft = jnp.asarray(TARGET), jnp.asarray(DRAFT)
    weight = jnp.exp(-3 * losses.acceptance(target, draft))

    def fixed(draft):
        kl, overlap = losses.forward_kl(target, draft), losses.acceptance(target, draft)
        return jnp.sum(weight * kl + (1 - weight) * (1 - overlap))

    expected = jax.grad(fixed)(draft)
    found = jax.grad(lambda draft: losses.lk_hybrid(target, draft).sum())(draft)
    np.testing.assert_allclose(found, expected, atol=1e-6)
