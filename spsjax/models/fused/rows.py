"""Rows of a kernel, and their products with columns of weights.

A program of a kernel computes some columns of the result for all rows. It normalises the rows
itself, which takes less time than a kernel of its own. Results are rounded to the compute type
where plain XLA code rounds them.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spsjax.models.quantization import Quantized
from spsjax.types import Array, pytree_dataclass
from spsjax.utils.powers import LEAST, power

MOST_ROWS = 64  # texts times tokens
MOST_TOKENS = 64  # per text: a prompt's longer chunks do not wait for kernels to start
_DEPTH = 128  # the most inputs that a program reads at a time
_TILE_BYTES = 2**15  # the most of weights that it reads at a time, because memory is shared
_WIDEST = 64  # the most columns of a program, of each matrix that it reads
_PROGRAMS = 64  # a program has fewer columns rather than that there are fewer programs


@pytree_dataclass
class Matrix:
    """Weights of a linear layer, as arrays or, inside of a kernel, as references to them."""

    kernel: Array  # [D, F], or the int8 integers of quantised weights
    size: Array | None = None  # scales [F] of the integers; None: the weights are not quantised
    bias: Array | None = None  # [F]

    @classmethod
    def of(cls, kernel: Array | Quantized, bias: Array | None = None) -> "Matrix":
        """Returns a matrix whose kernel may be quantised."""
        if isinstance(kernel, Quantized):
            return cls(kernel.steps, jnp.squeeze(kernel.size, kernel.inputs), bias)
        return cls(kernel, None, bias)


@pytree_dataclass
class Scale:
    """Weights of a norm, and its constants (`models.norm`)."""

    scale: Array  # [D]
    bias: Array | None  # [D] of a LayerNorm; None: an RMSNorm
    offset: float = dataclasses.field(metadata={"static": True})
    eps: float = dataclasses.field(metadata={"static": True})


def call(name, kernel, shapes, x_RD, interpret, programs=None) -> Callable:
    """Returns the call of a kernel, whose results have these shapes and the type of the rows."""
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, x_RD.dtype) for shape in shapes],
        grid=(programs or pl.cdiv(shapes[0][1], columns_of(shapes[0][1])),),
        name=name,
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=4),
    )


def columns_of(count: int) -> int:
    """Returns the number of columns of a program, if there are `count` in all."""
    width = _WIDEST
    while width > LEAST and pl.cdiv(count, width) < _PROGRAMS:
        width //= 2
    return width


@dataclasses.dataclass
class Columns:
    """Columns of a program."""

    index: Array  # [N] int32
    valid: Array  # [N] bool

    @classmethod
    def of(cls, count: int) -> "Columns":
        """Returns the columns of this program in a result of `count` columns."""
        width = columns_of(count)
        index = pl.program_id(0) * width + jnp.arange(width)
        return cls(index, index < count)


@dataclasses.dataclass
class Rows:
    """Rows that a kernel reads, normalised if there is a norm."""

    x_ref: Array
    index: Array  # [M] int32, with M a power of two
    valid: Array  # [M] bool
    norm: Scale | None
    mean: Array  # [M] float32; 0 in an RMSNorm
    factor: Array  # [M] float32: inverse root of the mean square

    @classmethod
    def of(cls, x_ref, norm: Scale | None = None) -> "Rows":
        """Returns all rows, with the statistics that their norm needs."""
        index = jnp.arange(power(x_ref.shape[0]))
        zeros = jnp.zeros(index.shape, jnp.float32)
        rows = cls(x_ref, index, index < x_ref.shape[0], norm, zeros, zeros)
        if norm is not None:
            if norm.bias is not None:
                rows.mean = rows._mean(lambda x: x)
            square = rows._mean(lambda x: x * x)
            rows.factor = lax.rsqrt(square + norm.eps)
        return rows

    def at(self, ref, columns: Columns):
        """Returns a reference to columns of these rows in an array of as many rows."""
        return ref.at[self.index[:, None], columns.index[None]]

    def mask(self, columns: Columns) -> Array:
        """Returns which of the entries of `at` exist."""
        return self.valid[:, None] & columns.valid[None]

    def _chunk(self, start, count: int) -> tuple[Array, Columns]:
        """Returns entries of the rows [M, count] as they are stored, and their columns."""
        index = start + jnp.arange(count)
        columns = Columns(index, index < self.x_ref.shape[1])
        return triton.load(
            self.at(self.x_ref, columns), mask=self.mask(columns), other=0.0
        ), columns

    def _mean(self, function: Callable[[Array], Array]) -> Array:
        """Returns the mean [M] of a function of the rows' distances from `mean`."""
        size = self.x_ref.shape[1]

        def body(step, total):
            x, columns = self._chunk(step * _DEPTH, _DEPTH)
            distance = jnp.where(columns.valid[None], x.astype(jnp.float32) - self.mean[:, None], 0)
            return total + jnp.sum(function(distance), axis=1)

        return lax.fori_loop(0, pl.cdiv(size, _DEPTH), body, jnp.zeros_like(self.mean)) / size

    def _inputs(self, start, count: int) -> tuple[Array, Columns]:
        """Returns entries [M, count] of the rows after the norm, and their columns."""
        x, columns = self._chunk(start, count)
        if self.norm is None:
            return x, columns
        wide = (x.astype(jnp.float32) - self.mean[:, None]) * self.factor[:, None]
        wide = wide * (self.norm.offset + vector(self.norm.scale, columns)[None])
        if self.norm.bias is not None:
            wide = wide + vector(self.norm.bias, columns)[None]
        return wide.astype(x.dtype), columns

    def times(self, matrices: Sequence[Matrix], columns: Sequence[Columns]) -> list[Array]:
        """Returns the products [M, N] of the rows with some columns of each matrix."""
        dtype = self.x_ref.dtype
        most = _TILE_BYTES // (sum(len(own.index) for own in columns) * dtype.itemsize)
        depth = min(max(1 << (most.bit_length() - 1), LEAST), _DEPTH)

        def body(step, sums):
            x, inputs = self._inputs(step * depth, depth)

            def product(matrix, own):
                weights = triton.load(
                    matrix.kernel.at[inputs.index[:, None], own.index[None]],
                    mask=inputs.valid[:, None] & own.valid[None],
                    other=0,
                )
                return triton.dot(x, weights.astype(dtype), precision=lax.Precision.HIGHEST)

            return [total + product(*pair) for total, *pair in zip(sums, matrices, columns)]

        zeros = [jnp.zeros((len(self.index), len(own.index)), jnp.float32) for own in columns]
        sums = lax.fori_loop(0, pl.cdiv(self.x_ref.shape[1], depth), body, zeros)
        results = []
        for total, matrix, own in zip(sums, matrices, columns):
            if matrix.size is not None:
                total = total * vector(matrix.size, own)[None]
            total = total.astype(dtype)
            if matrix.bias is not None:
                total = total + vector(matrix.bias, own)[None].astype(dtype)
            results.append(total)
        return results


def vector(ref, columns: Columns) -> Array:
    """Returns entries of a vector in float32."""
    return triton.load(ref.at[columns.index], mask=columns.valid, other=0.0).astype(jnp.float32)
