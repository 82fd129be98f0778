"""Linear layers and head logits, computed for at least two rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.models.products import product
from spsjax.types import Array

INIT = nnx.initializers.normal(0.02)
ACTIVATIONS = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}


def two_rows(function: Callable[..., Array], x: Array, *others: Array) -> Array:
    """Returns `function(x, *others)`; one row of bfloat16 is computed as two equal rows.

    Compilers handle one row badly. XLA for CPUs converts the weights to float32 (with JAX 0.12),
    and a TPU multiplies on its vector unit (docs/guides/pods.md).

    Args:
        function: function of rows that are independent of each other.
        x, others: rows [..., T, D].
    """
    if x.size > x.shape[-1] or x.dtype != jnp.bfloat16:
        return function(x, *others)
    return function(*(jnp.repeat(rows, 2, axis=-2) for rows in (x, *others)))[..., :1, :]


class Linear(nnx.Linear):
    """Linear layer that computes one row as two (`two_rows`), and supports int8 kernels."""

    def __call__(self, x):
        return two_rows(self._of_rows, x)

    def _of_rows(self, x):
        outputs = product(x.astype(self.dtype), self.kernel.get_value())
        return outputs if self.bias is None else outputs + self.bias[...].astype(self.dtype)


def head_logits(x_BTD: Array, kernel: Array, multiply=product) -> Array:
    """Returns logits [B, T, V] in float32 or float64, the precision that acceptance ratios need.

    Args:
        x_BTD: final hidden states.
        kernel: matrix [D, V], or an embedding [V, D] with `row_product`.
        multiply: product function, `product` or `row_product`.
    """
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    return two_rows(lambda x: multiply(x, kernel, wide), x_BTD)


def make_linear(features_in: int, features_out: int, bias: bool, *, dtype, rngs: nnx.Rngs):
    """Returns a linear layer with fresh weights of `dtype`."""
    return Linear(
        features_in,
        features_out,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        kernel_init=INIT,
        rngs=rngs,
    )
