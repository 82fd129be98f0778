import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import tiny_config

from spsjax.models import experts, quantization
from spsjax.parallel import sharding

mixture = jax.jit(experts.mixture, static_argnums=0)
rounded = jax.jit(quantization.rounded, static_argnums=1)


def config(num_experts, per_token, ffn="swiglu", d_ff=24):
    more = {"num_experts": num_experts, "experts_per_token": per_token}
    return tiny_config(16, d_model=16, d_ff=d_ff, ffn=ffn, **more)


def inputs(config, batch, tokens, skew=0.0, seed=0):
    """Returns activations, choices, weights and kernels; with `skew` all tokens choose alike."""
    rng = np.random.default_rng(seed)
    E, D, F = config.num_experts, config.d_model, config.d_ff
    scores = rng.normal(size=(batch, tokens, E)) + skew * np.arange(E)
    ids = np.argsort(-scores, axis=-1)[..., : config.experts_per_token]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, ids, True, axis=-1)
    weights = (chosen * rng.uniform(0.1, 1, scores.shape)).astype(np.float32)
    x = rng.normal(size=(batch, tokens, D)).astype(np.float32)
    shapes = (E, D, F), (E, D, F), (E, F, D)
    kernels = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, chosen, weights, kernels


def oracle(x, chosen, weights, kernels):
    """Runs the experts of one token after the other, in float64."""
    out = np.zeros(x.shape)
    for index in np.ndindex(*x.shape[:2]):
        for expert in np.flatnonzero(chosen[index]):
            gate, up, down = (kernel[expert].astype(np.float64) for kernel in kernels)
            before = x[index] @ gate
            inner = before / (1 + np.exp(-before)) * (x[index] @ up)
            out[index] += weights[index][expert] * (inner @ down)
    return out


# Few tokens and many, fewer and more than experts; all of the experts, one, and many.
@pytest.mark.parametrize("skew", (0.0, 5.0))
@pytest.mark.parametrize(
    ("num_experts", "per_token", "batch", "tokens"),
    [(8, 2, 1, 1), (8, 2, 2, 70), (4, 4, 3, 5), (1, 1, 1, 2), (32, 3, 3, 5)],
)
def test_each_token_gets_the_sum_of_its_own_experts(num_experts, per_token, batch, tokens, skew):
    shape = config(num_experts, per_token)
    arguments = inputs(shape, batch, tokens, skew)
    actual = mixture(shape, *arguments)
    np.testing.assert_allclose(actual, oracle(*arguments), rtol=1e-4, atol=1e-4)


def test_a_token_that_is_not_finite_spoils_no_other():
    shape = config(8, 2)
    x, chosen, weights, kernels = inputs(shape, 2, 9)
    clean = mixture(shape, x, chosen, weights, kernels)
    x[1, 4], weights[1, 4] = np.nan, np.nan
    actual = np.array(mixture(shape, x, chosen, weights, kernels))
    assert np.isnan(actual[1, 4]).all()
    actual[1, 4] = clean[1, 4]
    np.testing.assert_array_equal(actual, clean)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(mix, config, direction, x, chosen, weights, kernels):
    def loss(x, weights, kernels):
        return jnp.sum(direction * mix(config, x, chosen, weights, kernels))

    return jax.grad(loss, (0, 1, 2))(x, weights, kernels)


@pytest.mark.parametrize("ffn", ("swiglu", "geglu"))
def test_gradients_are_those_of_all_experts(ffn):
    shape = config(8, 2, ffn)
    arguments = inputs(shape, 2, 7)
    direction = np.random.default_rng(1).normal(size=arguments[0].shape)
    actual, expected = (
        gradients(mix, shape, direction, *arguments) for mix in (mixture, experts.all_experts)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), actual, expected
    )


# How the weights are placed: whole experts, a part of each, or copies.
WHOLE, SPLIT, COPIED = (8, 24), (6, 24), (6, 10)


@pytest.mark.parametrize(
    ("num_experts", "d_ff", "batch", "kind"),
    [
        (*WHOLE, 2, None),
        (*WHOLE, 1, "int8"),
        (*SPLIT, 1, None),
        (*SPLIT, 2, "int8_dynamic"),
        (*COPIED, 2, "int8"),
        pytest.param(*WHOLE, 1, "int8_dynamic", marks=pytest.mark.slow),
        pytest.param(*COPIED, 1, "int8_dynamic", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_gives_the_values_of_one_device(num_experts, d_ff, batch, kind):
    shape = config(num_experts, 2, d_ff=d_ff)
    x, chosen, weights, kernels = inputs(shape, batch, 5)
    if kind is not None:
        dynamic = kind == "int8_dynamic"
        kernels = tuple(
            quantization.Quantized(*rounded(kernel, -2), -2, dynamic) for kernel in kernels
        )
    alone = np.asarray(mixture(shape, x, chosen, weights, kernels))
    with sharding.use_mesh(sharding.mesh(2, 4)):
        actual = mixture(shape, x, chosen, weights, kernels)
    # A copied mixture does not round what its experts give.
    rounding = 0.03 if (kind, d_ff) == ("int8_dynamic", 10) else 1e-5
    np.testing.assert_allclose(actual, alone, rtol=1e-4, atol=rounding * np.abs(alone).max())


def test_experts_that_nobody_chose_are_not_read():
    shape = config(8, 2)
    x, chosen, weights, kernels = inputs(shape, 1, 3)
    spoiled = ~chosen.any(axis=(0, 1))
    assert spoiled.any()
    kernels = tuple(np.where(spoiled[:, None, None], np.nan, kernel) for kernel in kernels)
    assert np.isfinite(mixture(shape, x, chosen, weights, kernels)).all()
