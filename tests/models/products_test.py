"""Tests of the product with a weight matrix and of its gradient."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax.models.products import product, row_product
from spsjax.utils import bfloat16

RNG = np.random.default_rng(0)
X, KERNEL, WEIGHTS = (RNG.normal(size=size) for size in ((2, 3, 8), (8, 5), (2, 3, 5)))


BOTH = pytest.mark.parametrize("multiply", [product, row_product])


def of(multiply, kernel, dtype=jnp.float32):
    """The matrix as the function takes it: a kernel, or its columns as rows."""
    return np.asarray(kernel.T if multiply is row_product else kernel, dtype)


# A rounding that a fault adds must stay in the program.
STRICT = {"xla_allow_excess_precision": False}


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=STRICT)
def _with_gradients(multiply, dtype, x, matrix, weights):
    def weighted(x, matrix):
        result = multiply(x, matrix, dtype)
        return jnp.sum(weights * result), result

    (_, result), gradients = jax.value_and_grad(weighted, (0, 1), has_aux=True)(x, matrix)
    return result, *gradients


def with_gradients(multiply, x, matrix, dtype=None, weights=WEIGHTS):
    """Returns a product, and the gradients of its weighted sum by rows and by kernel [D, F]."""
    arrays = x, matrix, np.asarray(weights, np.float32)
    result, of_x, of_matrix = map(np.asarray, _with_gradients(multiply, dtype, *arrays))
    return result, of_x, of_matrix.T if multiply is row_product else of_matrix


@BOTH
def test_gradient_in_float32_is_that_of_a_plain_product(multiply):
    result, of_x, of_kernel = with_gradients(multiply, np.float32(X), of(multiply, KERNEL))
    np.testing.assert_allclose(result, X @ KERNEL, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_x, WEIGHTS @ KERNEL.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        of_kernel, np.einsum("btd,btf->df", X, WEIGHTS), rtol=1e-5, atol=1e-6
    )


@BOTH
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_gradient_of_float32_weights_is_not_rounded(multiply, dtype):
    """Its inputs are rounded to bfloat16, the sum over the rows is not."""
    x, kernel = X.astype(jnp.bfloat16), of(multiply, KERNEL)
    result, of_x, of_kernel = with_gradients(multiply, x, kernel, dtype)
    assert result.dtype == (dtype or jnp.bfloat16)
    assert of_x.dtype == jnp.bfloat16 and of_kernel.dtype == jnp.float32
    rounded_x, rounded = (array.astype(jnp.bfloat16).astype(np.float32) for array in (X, WEIGHTS))
    np.testing.assert_allclose(of_kernel, np.einsum("btd,btf->df", rounded_x, rounded), rtol=1e-5)
    np.testing.assert_allclose(of_x.astype(np.float32), WEIGHTS @ KERNEL.T, atol=0.05)


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 3, 4)])
def test_one_row_or_an_odd_number_of_rows_has_a_gradient(multiply, shape):
    x, kernel = np.ones(shape, jnp.bfloat16), of(multiply, np.ones((4, 2)), jnp.bfloat16)
    _, _, of_kernel = with_gradients(multiply, x, kernel, weights=np.ones((*shape[:2], 2)))
    np.testing.assert_array_equal(of_kernel.astype(np.float32), np.full((4, 2), shape[1]))


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or not bfloat16.is_multiplied_directly(),
    reason="only XLA for CPUs converts, and not every one multiplies bfloat16 directly",
)
def test_no_product_of_a_gradient_is_computed_in_float32():
    """A plain product's gradient is, on CPUs, which this test would notice."""
    x, kernel, gradient = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 32), (32, 48), (64, 48))
    )

    def num_conversions(function):
        def backward(x, kernel, gradient):
            return jax.vjp(function, x, kernel)[1](gradient)

        program = jax.jit(backward).lower(x, kernel, gradient).compile().as_text()
        return len(re.findall(r"= f32\[\d+,\d+\]\S* convert\(", program))

    assert num_conversions(product) == 0
    assert num_conversions(jnp.matmul) > 0
