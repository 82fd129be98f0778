"""Linear layers and head logits, computed for at least two rows."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.models.products import product, products
from spsjax.types import Array, PyTree

INIT = nnx.initializers.normal(0.02)
ACTIVATIONS = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}


def two_rows(function: Callable[[Array], PyTree], x: Array) -> PyTree:
    """Returns `function(x)`; one row of bfloat16 is computed as two equal rows.

    Compilers handle one row badly. XLA for CPUs converts the weights to float32 (with JAX 0.12),
    and a TPU multiplies on its vector unit (docs/pods.md).

    Args:
        function: function of rows that are independent of each other; it returns arrays of rows.
        x: rows [..., T, D].
    """
    if x.size > x.shape[-1] or x.dtype != jnp.bfloat16:
        return function(x)
    return jax.tree.map(lambda rows: rows[..., :1, :], function(jnp.repeat(x, 2, axis=-2)))


class Linear(nnx.Linear):
    """Linear layer that computes one row as two (`two_rows`), and supports int8 kernels."""

    def __call__(self, x):
        (outputs,) = outputs_of((self,), x)
        return outputs


def outputs_of(layers: Sequence[Linear], x: Array) -> tuple[Array, ...]:
    """Returns the output of each layer; all of them have the same compute type."""

    def of_rows(x):
        kernels = [layer.kernel.get_value() for layer in layers]
        return tuple(
            outputs if layer.bias is None else outputs + layer.bias[...].astype(layer.dtype)
            for layer, outputs in zip(layers, products(x.astype(layers[0].dtype), kernels))
        )

    return two_rows(of_rows, x)


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
    return Linear(
        features_in,
        features_out,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        kernel_init=INIT,
        rngs=rngs,
    )
