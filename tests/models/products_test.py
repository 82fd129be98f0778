"""Tests of the product with a weight matrix and of its gradient."""

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
    return jnp.asarray(kernel.T if multiply is row_product else kernel, dtype)


def gradients(multiply, x, matrix, dtype=None):
    """Gradients of a weighted sum of the results, with respect to rows and kernel [D, F]."""

    def weighted(x, matrix):
        return jnp.sum(WEIGHTS * multiply(x, matrix, dtype))

    of_x, of_matrix = jax.jit(jax.grad(weighted, argnums=(0, 1)))(x, matrix)
    return of_x, np.asarray(of_matrix).T if multiply is row_product else of_matrix


@BOTH
def test_gradient_in_float32_is_that_of_a_plain_product(multiply):
    x, kernel = jnp.asarray(X, jnp.float32), of(multiply, KERNEL)
    np.testing.assert_allclose(multiply(x, kernel), X @ KERNEL, rtol=1e-5, atol=1e-6)
    of_x, of_kernel = gradients(multiply, x, kernel)
    np.testing.assert_allclose(of_x, WEIGHTS @ KERNEL.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        of_kernel, np.einsum("btd,btf->df", X, WEIGHTS), rtol=1e-5, atol=1e-6
    )


@BOTH
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_gradient_of_float32_weights_is_not_rounded(multiply, dtype):
    """Its inputs are rounded to bfloat16, the sum over the rows is not."""
    x, kernel = jnp.asarray(X, jnp.bfloat16), of(multiply, KERNEL)
    assert multiply(x, kernel, dtype).dtype == (dtype or jnp.bfloat16)
    of_x, of_kernel = gradients(multiply, x, kernel, dtype)
    assert of_x.dtype == jnp.bfloat16 and of_kernel.dtype == jnp.float32
    rounded_x, rounded = (
        np.asarray(jnp.asarray(array, jnp.bfloat16).astype(jnp.float32)) for array in (X, WEIGHTS)
    )
    np.testing.assert_allclose(of_kernel, np.einsum("btd,btf->df", rounded_x, rounded), rtol=1e-5)
    np.testing.assert_allclose(of_x.astype(jnp.float32), WEIGHTS @ KERNEL.T, atol=0.05)


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 3, 4)])
def test_one_row_or_an_odd_number_of_rows_has_a_gradient(multiply, shape):
    x, kernel = jnp.ones(shape, jnp.bfloat16), of(multiply, np.ones((4, 2)), jnp.bfloat16)
    grad = jax.grad(lambda kernel: jnp.sum(multiply(x, kernel)).astype(jnp.float32))(kernel)
    np.testing.assert_array_equal(grad.astype(jnp.float32), np.full(kernel.shape, shape[1]))


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
