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


BETAS = 0.1, 0.5, 0.9, 1e-4, 1 - 1e-4
DIVERGENCES = *losses.DIVERGENCES, "acceptance"


# One program gives what all tests of these logits need.
@jax.jit
def everything(target, draft):
    values = {name: getattr(losses, name)(target, draft) for name in EXPECTED}
    values["cross_entropy"] = losses.cross_entropy(draft, LABELS)
    for beta in BETAS:
        name = f"jensen_shannon:{beta:g}"
        values[name] = losses.divergence(name)(target, draft)
    values["mixed:0.25"] = losses.divergence("mixed:0.25")(target, draft)
    return values


@jax.jit
def gradients(target, draft):
    """Returns sums of every divergence, and their gradients with respect to the draft's logits."""

    def total(draft, name):
        return getattr(losses, name)(target, draft).sum()

    return {name: jax.value_and_grad(total)(draft, name) for name in DIVERGENCES}


@pytest.fixture(scope="module")
def values():
    return everything(TARGET, DRAFT)


def test_divergences_equal_numpy(values):
    assert losses.DIVERGENCES.keys() <= EXPECTED.keys()
    rows, columns = np.indices(LABELS.shape)
    cross_entropy = {"cross_entropy": -np.log(draft_probs[rows, columns, LABELS])}
    for name, expected in (EXPECTED | cross_entropy).items():
        np.testing.assert_allclose(values[name], expected, atol=2e-6, err_msg=name)


def test_divergences_of_equal_models_are_zero():
    for name, (value, gradient) in gradients(TARGET, TARGET).items():
        if name != "acceptance":
            assert abs(value) < 1e-5, name
        if name in ("forward_kl", "reverse_kl", "jensen_shannon"):  # the others are not smooth
            assert np.abs(gradient).max() < 1e-6, name


def test_gradient_descent_raises_the_acceptance():
    """On every divergence by itself, each of which has a draft of its own."""
    names = sorted(losses.DIVERGENCES)

    @jax.jit
    def trained(target, draft):
        def total(drafts):
            pairs = zip(names, drafts)
            return sum(losses.DIVERGENCES[name](target, draft).sum() for name, draft in pairs)

        def descend(_, drafts):
            return drafts - 0.3 * jax.grad(total)(drafts)

        drafts = jax.lax.fori_loop(0, 50, descend, jnp.stack([draft] * len(names)))
        return losses.acceptance(target, drafts).mean(axis=(1, 2))

    after = trained(TARGET.astype(np.float32), DRAFT.astype(np.float32))
    assert (after > OVERLAP.mean() + 0.05).all(), dict(zip(names, after))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_logits_give_finite_values_and_gradients(dtype):
    target = jnp.asarray([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], dtype)
    draft = jnp.asarray([[-1e4, 0.0, 1e4], [200.0, 0.0, 0.0]], dtype)
    for name, (value, gradient) in gradients(target, draft).items():
        gradient = np.asarray(gradient, np.float32)
        assert np.isfinite(value) and np.isfinite(gradient).all(), name
        assert value.dtype == jnp.float32, name  # also for bfloat16 logits


def test_lk_hybrid_weight_has_no_gradient():
    @jax.jit
    def found_and_expected(target, draft):
        weight = jnp.exp(-3 * losses.acceptance(target, draft))

        def fixed(draft):
            kl, overlap = losses.forward_kl(target, draft), losses.acceptance(target, draft)
            return jnp.sum(weight * kl + (1 - weight) * (1 - overlap))

        found = jax.grad(lambda draft: losses.lk_hybrid(target, draft).sum())(draft)
        return found, jax.grad(fixed)(draft)

    np.testing.assert_allclose(*found_and_expected(TARGET, DRAFT), atol=1e-6)


def test_beta_weighs_the_target(values):
    """Towards 0 and 1, the divergence of Jensen and Shannon tends to either one of Kullback's."""
    for beta in BETAS[:3]:
        expected = jensen_shannon(beta)
        np.testing.assert_allclose(values[f"jensen_shannon:{beta:g}"], expected, atol=2e-6)
    for beta, expected in zip(BETAS[3:], (KL, REVERSE)):
        np.testing.assert_allclose(values[f"jensen_shannon:{beta:g}"] / 1e-4, expected, rtol=0.1)
    np.testing.assert_allclose(values["mixed:0.25"], KL / 4 + 3 * VARIATION / 4, atol=2e-6)


def test_point_mass_log_acceptance_is_cross_entropy(values):
    points = np.where(np.arange(11) == LABELS[..., None], 0.0, -1e9)
    result = everything(points, DRAFT)["negative_log_acceptance"]
    np.testing.assert_allclose(result, values["cross_entropy"], atol=1e-5)


@pytest.mark.parametrize("name", ["kl", "forward_kl:0.5", "jensen_shannon:1", "jensen_shannon:x"])
def test_unknown_objective_is_refused(name):
    with pytest.raises(InputError, match=r"^divergence: expected "):
        losses.divergence(name)


top_k_with_rest = jax.jit(losses.top_k_with_rest)
COARSE = "forward_kl", "reverse_kl", "jensen_shannon", "total_variation"


@pytest.mark.parametrize("k", [1, 4, 10])
def test_top_k_divergence_is_at_most_the_full_one(k):
    """With all tokens but one stored, the two are equal. The rest is the sum of the others."""
    ids = np.argsort(-TARGET, axis=-1)[..., :k]
    probs = np.take_along_axis(target_probs, ids, axis=-1)
    expected = np.concatenate([probs, 1 - probs.sum(-1, keepdims=True)], axis=-1)
    np.testing.assert_allclose(np.exp(top_k_with_rest(TARGET, ids)), expected, atol=1e-6)

    @jax.jit
    def reduced(target, draft):
        pair = losses.top_k_with_rest(target, ids), losses.top_k_with_rest(draft, ids)
        return [losses.DIVERGENCES[name](*pair) for name in COARSE]

    for name, value in zip(COARSE, reduced(TARGET, DRAFT)):
        full = EXPECTED[name]
        assert np.all(value <= full * (1 + 1e-3) + 1e-5), name  # 1 - sum loses bits
        if k == 10:  # the rest is one token
            np.testing.assert_allclose(value, full, rtol=1e-3, atol=1e-5)


def test_coarse_distribution_without_a_rest_has_finite_gradients():
    target = np.asarray([[50.0, 49.0, -50.0, -50.0]] * 2, np.float32)
    draft = np.zeros((2, 4), np.float32)
    draft[0, :2] = 60  # without a rest in one row, with one in the other
    ids = np.asarray([[0, 1]] * 2)

    @jax.jit
    def results(draft):
        def loss(draft, name):
            pair = losses.top_k_with_rest(target, ids), losses.top_k_with_rest(draft, ids)
            return losses.DIVERGENCES[name](*pair).sum()

        return {name: jax.value_and_grad(loss)(draft, name) for name in losses.DIVERGENCES}

    for name, (value, gradient) in results(draft).items():
        assert np.isfinite(value) and np.isfinite(gradient).all(), name
    assert np.isfinite(top_k_with_rest(target, ids)).all()


def test_best_token_is_the_cross_entropy_of_the_targets_choice():
    found = jax.jit(losses.best_token)(TARGET, DRAFT)
    rows, columns = np.indices(LABELS.shape)
    expected = -np.log(draft_probs[rows, columns, TARGET.argmax(axis=-1)])
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_pace_is_the_gradient_of_the_expected_accepted_length():
    """With respect to the smoothed log probabilities, of tokens that count (2605.18810, 3)."""
    confidences = np.random.default_rng(1).uniform(0, 1, (3, 4))
    counts = np.asarray([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0]])

    @jax.jit
    def weights(confidences):
        def length(logs):
            return jnp.sum(counts * jnp.exp(jnp.cumsum(logs * counts, axis=-1)))

        expected = jax.grad(length)(jnp.log(0.7 * confidences + 0.3))
        own = jax.grad(lambda values: losses.pace(values, counts, 0.3).sum())(confidences)
        return losses.pace(confidences, counts, 0.3), expected, own

    found, expected, gradient = weights(confidences)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(gradient).max() == 0
