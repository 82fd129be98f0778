"""Tests of losses against plain NumPy in float64, and of their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax import InputError
from spsjax.training import losses

RNG = np.random.default_rng(0)
TARGET, DRAFT = (RNG.normal(0, 3, (2, 5, 11)) for _ in range(2))
LABELS = RNG.integers(0, 11, (2, 5))


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


target_probs, draft_probs = softmax(TARGET), softmax(DRAFT)
KL = (target_probs * np.log(target_probs / draft_probs)).sum(-1)
OVERLAP = np.minimum(target_probs, draft_probs).sum(-1)
REVERSE = (draft_probs * np.log(draft_probs / target_probs)).sum(-1)
VARIATION = 0.5 * np.abs(target_probs - draft_probs).sum(-1)


def jensen_shannon(beta):
    middle = beta * target_probs + (1 - beta) * draft_probs
    first = (target_probs * np.log(target_probs / middle)).sum(-1)
    return beta * first + (1 - beta) * (draft_probs * np.log(draft_probs / middle)).sum(-1)


EXPECTED = {
    "forward_kl": KL,
    "reverse_kl": REVERSE,
    "jensen_shannon": jensen_shannon(0.5),
    "negative_log_acceptance": -np.log(OVERLAP),
    "acceptance": OVERLAP,
    "total_variation": VARIATION,
    "lk_hybrid": np.exp(-3 * OVERLAP) * KL + (1 - np.exp(-3 * OVERLAP)) * VARIATION,
    "mixed": (KL + VARIATION) / 2,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_divergence_equals_numpy(name):
    np.testing.assert_allclose(getattr(losses, name)(TARGET, DRAFT), EXPECTED[name], atol=2e-6)


def test_cross_entropy_equals_numpy():
    rows, columns = np.indices(LABELS.shape)
    expected = -np.log(draft_probs[rows, columns, LABELS])
    np.testing.assert_allclose(losses.cross_entropy(DRAFT, LABELS), expected, atol=2e-6)


def test_every_divergence_has_an_expected_value():
    assert losses.DIVERGENCES.keys() <= EXPECTED.keys()


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_divergence_of_equal_models_is_zero(name):
    loss = losses.DIVERGENCES[name]
    target = jnp.asarray(TARGET, jnp.float32)
    value, gradient = jax.value_and_grad(lambda draft: loss(target, draft).sum())(target)
    assert abs(value) < 1e-5
    if name in ("forward_kl", "reverse_kl", "jensen_shannon"):  # the others are not smooth there
        assert jnp.abs(gradient).max() < 1e-6


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_gradient_descent_raises_the_acceptance(name):
    loss = losses.DIVERGENCES[name]
    target, draft = jnp.asarray(TARGET), jnp.asarray(DRAFT)
    for _ in range(50):
        draft -= 0.3 * jax.grad(lambda draft: loss(target, draft).sum())(draft)
    after = losses.acceptance(target, draft).mean()
    assert after > losses.acceptance(target, DRAFT).mean() + 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*losses.DIVERGENCES, "acceptance"])
def test_extreme_logits_give_finite_values_and_gradients(name, dtype):
    target = jnp.asarray([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], dtype)
    draft = jnp.asarray([[-1e4, 0.0, 1e4], [200.0, 0.0, 0.0]], dtype)
    loss = getattr(losses, name)
    value, gradient = jax.value_and_grad(lambda draft: loss(target, draft).sum())(draft)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
    assert value.dtype == jnp.float32  # also for bfloat16 logits


def test_lk_hybrid_weight_has_no_gradient():
    target, draft = jnp.asarray(TARGET), jnp.asarray(DRAFT)
    weight = jnp.exp(-3 * losses.acceptance(target, draft))

    def fixed(draft):
        kl, overlap = losses.forward_kl(target, draft), losses.acceptance(target, draft)
        return jnp.sum(weight * kl + (1 - weight) * (1 - overlap))

    expected = jax.grad(fixed)(draft)
    result = jax.grad(lambda draft: losses.lk_hybrid(target, draft).sum())(draft)
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jensen_shannon_beta_weighs_the_target(beta):
    result = losses.divergence(f"jensen_shannon:{beta}")(TARGET, DRAFT)
    np.testing.assert_allclose(result, jensen_shannon(beta), atol=2e-6)


def test_mixed_beta_weighs_the_divergence():
    result = losses.divergence("mixed:0.25")(TARGET, DRAFT)
    np.testing.assert_allclose(result, KL / 4 + 3 * VARIATION / 4, atol=2e-6)


def test_jensen_shannon_tends_to_both_kl_divergences():
    near = [losses.jensen_shannon(TARGET, DRAFT, beta) for beta in (1e-4, 1 - 1e-4)]
    np.testing.assert_allclose(near[0] / 1e-4, KL, rtol=0.1)
    np.testing.assert_allclose(near[1] / 1e-4, REVERSE, rtol=0.1)


def test_point_mass_log_acceptance_is_cross_entropy():
    points = np.where(np.arange(11) == LABELS[..., None], 0.0, -1e9)
    result = losses.negative_log_acceptance(points, DRAFT)
    np.testing.assert_allclose(result, losses.cross_entropy(DRAFT, LABELS), atol=1e-5)


@pytest.mark.parametrize(
    "name", ["kl", "forward_kl:0.5", "jensen_shannon:", "jensen_shannon:1", "jensen_shannon:x", ""]
)
def test_unknown_objective_is_refused(name):
    with pytest.raises(InputError, match=r"^objective: expected "):
        losses.divergence(name)


@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"])
def test_top_k_divergence_is_at_most_the_full_one(name, k):
    """With all tokens but one stored, the two are equal."""
    ids = np.argsort(-TARGET, axis=-1)[..., :k]
    pair = losses.top_k_with_rest(TARGET, ids), losses.top_k_with_rest(DRAFT, ids)
    full, reduced = EXPECTED[name], losses.DIVERGENCES[name](*pair)
    assert np.all(reduced <= full * (1 + 1e-3) + 1e-5)  # 1 - sum loses bits
    if k == 10:  # the rest is one token
        np.testing.assert_allclose(reduced, full, rtol=1e-3, atol=1e-5)


def test_top_k_with_rest_sums_the_other_tokens():
    ids = np.argsort(-TARGET, axis=-1)[..., :3]
    probs = np.take_along_axis(target_probs, ids, axis=-1)
    expected = np.concatenate([probs, 1 - probs.sum(-1, keepdims=True)], axis=-1)
    np.testing.assert_allclose(np.exp(losses.top_k_with_rest(TARGET, ids)), expected, atol=1e-6)


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_coarse_distribution_without_a_rest_has_finite_gradients(name):
    """If the stored tokens have all the mass, the rest is not zero, and gradients are finite."""
    target, draft = jnp.asarray([[50.0, 49.0, -50.0, -50.0]] * 2), jnp.zeros((2, 4))
    draft = draft.at[0, :2].set(60.0)  # without a rest in one row, with one in the other
    ids = jnp.asarray([[0, 1]] * 2)

    def loss(draft):
        pair = losses.top_k_with_rest(target, ids), losses.top_k_with_rest(draft, ids)
        return losses.DIVERGENCES[name](*pair).sum()

    value, gradient = jax.value_and_grad(loss)(draft)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
    assert jnp.isfinite(losses.top_k_with_rest(target, ids)).all()
