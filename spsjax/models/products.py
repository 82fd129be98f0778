"""Products with a weight matrix, whose gradients are fast in bfloat16 on CPUs, too.

A quantised matrix is a constant, and no gradient is to be taken through its products.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.models.quantization import Quantized
from spsjax.types import Array


def product(x: Array, kernel_DF: Array | Quantized, dtype=None, axis: str | None = None) -> Array:
    """Returns x [..., D] times the kernel: [..., F].

    The kernel is rounded to the type of `x` first, and so is the gradient that arrives from the
    result. A float32 kernel's own gradient is a float32 sum over the rows. There is no forward-mode
    derivative.

    Args:
        x: rows.
        kernel_DF: weight matrix.
        dtype: type of the result; None: that of `x`.
        axis: mesh axis over which rows and kernel are split inside of `shard_map`, if they are.
    """
    if isinstance(kernel_DF, Quantized):
        return kernel_DF.times(x, dtype, axis)
    return _product(x, kernel_DF, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, kernel_DF, dtype=None):
    return jnp.matmul(x, kernel_DF.astype(x.dtype), preferred_element_type=dtype)


def _product_forward(x, kernel_DF, dtype):
    return _product(x, kernel_DF, dtype), (x, kernel_DF)


def _product_backward(dtype, saved, gradient):
    x, kernel_DF = saved
    gradient = gradient.astype(x.dtype)
    of_x = gradient @ _transposed(kernel_DF.astype(x.dtype))
    return of_x, _outer(x, gradient, kernel_DF.dtype)


_product.defvjp(_product_forward, _product_backward)


def row_product(x: Array, rows_VD: Array | Quantized, dtype=None) -> Array:
    """Returns the products of x [..., D] with the rows of a matrix: [..., V].

    It is `product` with the transpose, and serves embeddings that are heads, too.
    """
    if isinstance(rows_VD, Quantized):
        return rows_VD.times(x, dtype)
    return _row_product(x, rows_VD, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _row_product(x, rows_VD, dtype=None):
    rows_VD = rows_VD.astype(x.dtype)
    return jnp.einsum("...d,vd->...v", x, rows_VD, preferred_element_type=dtype)


def _row_product_forward(x, rows_VD, dtype):
    return _product(x, _transposed(rows_VD.astype(x.dtype)), dtype), (x, rows_VD)


def _row_product_backward(dtype, saved, gradient):
    x, rows_VD = saved
    gradient = gradient.astype(x.dtype)
    return gradient @ rows_VD.astype(x.dtype), _outer(gradient, x, rows_VD.dtype)


_row_product.defvjp(_row_product_forward, _row_product_backward)


def _outer(left: Array, right: Array, dtype) -> Array:
    """[..., D], [..., F] -> [D, F]: the sum of the outer products."""
    left, right = (array.reshape(-1, array.shape[-1]) for array in (left, right))
    return jnp.matmul(_transposed(left), right, preferred_element_type=dtype)


def _transposed(matrix: Array) -> Array:
    """Returns the transpose [F, D] of a matrix [D, F].

    XLA for CPUs (seen with JAX 0.12) makes a transpose part of the product that reads it, and
    computes that product in float32, at half of bfloat16's speed. It does not do so with a
    transpose in two halves, and copying them takes a tenth of the time that the product saves.
    """

    def in_halves(matrix):
        half = len(matrix) // 2
        return jnp.concatenate([matrix[:half].T, matrix[half:].T], axis=1)

    # On a mesh the halves of a split dimension would have to be exchanged.
    if matrix.dtype != jnp.bfloat16 or not jax.sharding.get_abstract_mesh().empty:
        return matrix.T
    return lax.platform_dependent(matrix, cpu=in_halves, default=jnp.transpose)
