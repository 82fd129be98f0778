"""Linear layers, which are never given one row alone, and what is made of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.models.products import product
from spsjax.types import Array

INIT = nnx.initializers.normal(0.02)
ACTIVATIONS = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}


def two_rows(function: Callable[[Array], Array], x: Array) -> Array:
    """Returns `function(x)`, computed for two equal rows where `x` is one row of bfloat16.

    One row is the slow case of several compilers. XLA for CPUs converts the weights to float32
    (seen with JAX 0.12), and a TPU multiplies on its vector unit (docs/pods.md).

    Args:
        function: maps rows independently of each other.
        x: [..., T, D].
    """
    if x.size > x.shape[-1] or x.dtype != jnp.bfloat16:
        return function(x)
    return function(jnp.repeat(x, 2, axis=-2))[..., :1, :]


class Linear(nnx.Linear):
    """A linear layer that is never given one row alone."""

    def __call__(self, x):
        return two_rows(self._of_rows, x)

    def _of_rows(self, x):
        outputs = product(x.astype(self.dtype), self.kernel.get_value())
        return outputs if self.bias is None else outputs + self.bias[...].astype(self.dtype)


def head_logits(x_BTD: Array, kernel: Array, multiply=product) -> Array:
    """Returns logits [B, T, V] of at least float32: the sampler's ratios need the bits.

    Args:
        x_BTD: final hidden states.
        kernel: [D, V], or [V, D] for an embedding that is multiplied by `row_product`.
        multiply: `product` or `row_product`.
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
