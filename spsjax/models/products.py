"""Products with a weight matrix, with gradients that are also fast in bfloat16 on CPUs.

Quantised matrices are constants, and their products have no useful gradient.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.models.quantization import Quantized
from spsjax.types import Array


def product(x: Array, kernel_DF: Array | Quantized, dtype=None, axis: str | None = None) -> Array:
    """Returns x [..., D] times the kernel: [..., F].

    The kernel is converted to the type of `x`, and so is the incoming gradient. The gradient of a
    float32 kernel is a float32 sum over the rows. There is no forward-mode derivative.

    Args:
        x: rows.
        kernel_DF: weight matrix.
        dtype: type of the result; None: type of `x`.
        axis: mesh axis over which rows and kernel are split inside of `shard_map`; None: none.
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
    grad_x = gradient @ _transposed(kernel_DF.astype(x.dtype))
    return grad_x, _outer(x, gradient, kernel_DF.dtype)


_product.defvjp(_product_forward, _product_backward)


def row_product(x: Array, rows_VD: Array | Quantized, dtype=None) -> Array:
    """Returns the products of x [..., D] with the rows of a matrix: [..., V].

    It equals `product` with the transposed matrix, and is used for tied embeddings.
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


def _outer(x: Array, y: Array, dtype) -> Array:
    """Returns the sum of the outer products of rows: [..., D], [..., F] -> [D, F]."""
    x, y = (array.reshape(-1, array.shape[-1]) for array in (x, y))
    return jnp.matmul(_transposed(x), y, preferred_element_type=dtype)


def _transposed(matrix_DF: Array) -> Array:
    """Returns the transpose [F, D] of a matrix [D, F].

    XLA for CPUs (with JAX 0.12) fuses a transpose with the product that reads it, and computes that
    product in float32, at half the speed of bfloat16. It does not fuse a transpose in two halves,
    and the copy takes a tenth of the time that this saves.
    """

    def in_halves(matrix_DF):
        half = len(matrix_DF) // 2
        return jnp.concatenate([matrix_DF[:half].T, matrix_DF[half:].T], axis=1)

    # On a mesh, devices would have to exchange the halves of a split axis.
    if matrix_DF.dtype != jnp.bfloat16 or not jax.sharding.get_abstract_mesh().empty:
        return matrix_DF.T
    return lax.platform_dependent(matrix_DF, cpu=in_halves, default=jnp.transpose)
