"""LSTM of several layers (Hochreiter and Schmidhuber 1997), whose forget gates begin open."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from spsjax.models.linear import Linear
from spsjax.types import Array, PyTree


class LSTM(nnx.Module):
    """LSTM of L layers. Its carry is the output and the memory of each layer."""

    def __init__(
        self, inputs: int, width: int, num_layers: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        make = {"dtype": dtype, "rngs": rngs}
        sizes = [inputs] + [width] * (num_layers - 1)
        self.layers = nnx.List([_Layer(size, width, **make) for size in sizes])

    def __call__(self, x_BTI: Array, carry_BL2D: Array, new_BT: Array) -> tuple[Array, Array]:
        """Returns the outputs [B, T, D], and the carries [B, T, L, 2, D] after each step.

        Steps that are not `new_BT` do not change the carry.
        """
        carries = []
        for number, layer in enumerate(self.layers):
            carries.append(layer(x_BTI, carry_BL2D[:, number], new_BT))
            x_BTI = carries[-1][:, :, 0]
        return x_BTI, jnp.stack(carries, axis=2)


class _Layer(nnx.Module):
    def __init__(self, inputs: int, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        make = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.read = Linear(inputs, 4 * width, **make)
        self.keep = Linear(width, 4 * width, use_bias=False, **make)

    def __call__(self, x_BTI: Array, carry_B2D: Array, new_BT: Array) -> Array:
        def step(carry_B2D: Array, inputs: PyTree) -> tuple[Array, Array]:
            read_BG, new_B = inputs
            hidden, memory = carry_B2D[:, 0], carry_B2D[:, 1]
            gates = read_BG + self.keep(hidden[:, None])[:, 0]  # `Linear` counts rows on axis -2
            enter, forget, cell, leave = jnp.split(gates, 4, axis=-1)
            # The offset of 1 opens the forget gate at initialisation (Jozefowicz et al. 2015).
            memory = nnx.sigmoid(forget + 1) * memory + nnx.sigmoid(enter) * jnp.tanh(cell)
            hidden = nnx.sigmoid(leave) * jnp.tanh(memory)
            carry = jnp.where(new_B[:, None, None], jnp.stack([hidden, memory], 1), carry_B2D)
            return carry, carry

        inputs = jnp.moveaxis(self.read(x_BTI), 1, 0), jnp.moveaxis(new_BT, 1, 0)
        return jnp.moveaxis(lax.scan(step, carry_B2D, inputs)[1], 0, 1)
