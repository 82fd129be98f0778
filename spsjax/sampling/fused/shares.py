"""Shares of rows, one per program, and calls of kernels for all of them."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spsjax.types import Array, PyTree, pytree_dataclass
from spsjax.utils.powers import power

SIZE = 1024  # tokens of a program
LAST = 2**31 - 1  # no token


def supports(array: Array) -> bool:
    """Returns whether the kernels can read logits or weights [..., V]."""
    return array.size > 0 and array.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


@pytree_dataclass
class Peaks:
    """Greatest logit and sum of weights of each share."""

    best: Array  # [R, P] float32: greatest logit
    index: Array  # [R, P] int32: the first token that has it
    total: Array  # [R, P] float32: sum of the weights relative to it
    finite: Array  # [R, P] int32: 1 if all logits are finite


def call(kernel: Callable, shapes: PyTree, grid: Sequence[int], interpret: bool) -> Callable:
    """Returns the call of a kernel, whose results have these shapes."""
    name = getattr(kernel, "func", kernel).__name__
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=tuple(grid),
        name=name.lstrip("_"),
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=4),
    )


@dataclasses.dataclass
class Kernels:
    """Calls of kernels for all shares of some logits."""

    logits: Array  # [R, V]
    temperature: Array  # [R] float32: temperatures, 1 in greedy rows
    interpret: bool

    def __call__(self, kernel: Callable, shapes: PyTree, *arguments: PyTree) -> PyTree:
        """Returns the results of a kernel."""
        grid = len(self.logits), pl.cdiv(self.logits.shape[1], SIZE)
        return call(kernel, shapes, grid, self.interpret)(self.logits, self.temperature, *arguments)


@dataclasses.dataclass
class Share:
    """The W tokens of a program."""

    row: Array
    number: Array
    index: Array  # [W] int32
    exists: Array  # [W] bool
    x: Array  # [W] float32: their logits or weights; -inf after the last token

    @classmethod
    def of(cls, x_ref) -> "Share":
        row, number = pl.program_id(0), pl.program_id(1)
        index = number * SIZE + jnp.arange(SIZE, dtype=jnp.int32)
        exists = index < x_ref.shape[1]
        x = triton.load(x_ref.at[row, index], mask=exists, other=-jnp.inf)
        return cls(row, number, index, exists, x.astype(jnp.float32))

    def weights(self, best: Array, temperature: Array) -> Array:
        """Returns weights [W] relative to the best logit, 0 after the last token."""
        return jnp.exp((self.x - best) / temperature)

    def of_all(self, ref, other) -> Array:
        """Returns the numbers of all shares of the row, padded with `other`."""
        shares = jnp.arange(power(ref.shape[1]), dtype=jnp.int32)
        return triton.load(ref.at[self.row, shares], mask=shares < ref.shape[1], other=other)

    def best_of_row(self, peaks: Peaks) -> Array:
        return jnp.max(self.of_all(peaks.best, -jnp.inf))
