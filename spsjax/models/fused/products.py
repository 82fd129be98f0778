"""Products of a few rows with weights, with what comes before and after them in the same kernel.

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

MOST_ROWS = 64
_LEAST = 16  # least size of a side of a product in a kernel
_DEPTH = 128  # inputs that a program reads at a time
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


def added(x_RD: Array, matrix: Matrix, stream_RF: Array, interpret: bool = False) -> Array:
    """Returns the residual stream [R, F] plus the products of rows with a matrix."""

    def kernel(x_ref, matrix, stream_ref, out_ref):
        rows, columns = _Rows.of(x_ref), _Columns.of(out_ref.shape[1])
        product = rows.times([matrix], [columns])[0]
        at = rows.at(out_ref, columns)
        stream = triton.load(rows.at(stream_ref, columns), mask=rows.mask(columns), other=0.0)
        triton.store(at, stream + product, mask=rows.mask(columns))

    return _call("added", kernel, [stream_RF.shape], x_RD, interpret)(x_RD, matrix, stream_RF)[0]


def activated(
    x_RD: Array,
    norm: Scale,
    matrices: Sequence[Matrix],
    activation: Callable[[Array], Array],
    interpret: bool = False,
) -> Array:
    """Returns the hidden units [R, F] of a feed-forward network, for rows before its norm.

    `matrices` are those of the gate, if there is one, and of the units.
    """

    def kernel(x_ref, norm, matrices, out_ref):
        rows, columns = _Rows.of(x_ref, norm), _Columns.of(out_ref.shape[1])
        first, *rest = rows.times(matrices, [columns] * len(matrices))
        hidden = activation(first.astype(jnp.float32)).astype(first.dtype)
        hidden = hidden * rest[0] if rest else hidden
        triton.store(rows.at(out_ref, columns), hidden, mask=rows.mask(columns))

    shape = len(x_RD), matrices[0].kernel.shape[1]
    return _call("activated", kernel, [shape], x_RD, interpret)(x_RD, norm, list(matrices))[0]


def heads(
    x_RD: Array,
    norm: Scale,
    matrices: Sequence[Matrix],
    head_norms: Sequence[Scale | None],
    angles: tuple[Array, Array] | None,
    head_dim: int,
    tokens: int,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Returns queries [R, H, C], keys and values [B, G, T, C], for rows before the layer's norm.

    Queries and keys are normalised and rotated, and values are finite (`context.finite_values`).

    Args:
        x_RD: rows: T tokens of each of B texts.
        norm: norm of the rows.
        matrices: projections to queries, keys and values.
        head_norms: norms of the heads of queries and of keys; None: they are not normalised.
        angles: cosine and sine [R, C/2] of the rows' positions; None: there is no rotation.
        head_dim: C, an even number.
        tokens: T.
    """
    counts = [matrix.kernel.shape[1] // head_dim for matrix in matrices]
    # A program has columns of one head: some of its first half, and those of its second half that
    # are rotated against them. The norm of a head needs all columns.
    half, is_whole = head_dim // 2, head_norms[0] is not None
    width = _power(half) if is_whole else min(_width(half * sum(counts[:2])), _power(half))
    parts = pl.cdiv(half, width)

    def kernel(x_ref, norm, matrices, head_norms, angles, query_ref, key_ref, value_ref):
        rows, head = _Rows.of(x_ref, norm), pl.program_id(0) // parts
        column = (pl.program_id(0) % parts) * width + jnp.arange(width)

        def halves(head):
            return [
                _Columns(head * head_dim + start + column, column < half) for start in (0, half)
            ]

        def placed(pair, head_norm):
            pair = pair if head_norm is None else _normalised(pair, head_norm, column, half)
            return pair if angles is None else _rotated(pair, rows, angles, column, half)

        def store_rows(out_ref, head, pair):
            for index, values in enumerate(pair):
                where = _Columns(index * half + column, column < half)
                text, token = rows.index // tokens, rows.index % tokens
                at = out_ref.at[text[:, None], head, token[:, None], where.index[None]]
                triton.store(at, values, mask=rows.mask(where))

        @pl.when(head < counts[0])
        def _():
            own = halves(head)
            pair = placed(rows.times([matrices[0]] * 2, own), head_norms[0])
            for columns, values in zip(own, pair):
                triton.store(rows.at(query_ref, columns), values, mask=rows.mask(columns))

        @pl.when(head >= counts[0])
        def _():
            own = halves(head - counts[0])
            *keys, first, second = rows.times([matrices[1]] * 2 + [matrices[2]] * 2, own * 2)
            keys, values = placed(keys, head_norms[1]), (first, second)
            finite = [value - value == 0 for value in values]
            keys = [jnp.where(mask, key, jnp.nan) for mask, key in zip(finite, keys)]
            values = [jnp.where(mask, value, 0) for mask, value in zip(finite, values)]
            store_rows(key_ref, head - counts[0], keys)
            store_rows(value_ref, head - counts[0], values)

    R = len(x_RD)
    shape = R // tokens, counts[1], tokens, head_dim
    shapes, programs = [(R, counts[0] * head_dim), shape, shape], sum(counts[:2]) * parts
    call = _call("heads", kernel, shapes, x_RD, interpret, programs)
    query, key, value = call(x_RD, norm, list(matrices), list(head_norms), angles)
    return query.reshape(R, -1, head_dim), key, value


def _call(name, kernel, shapes, x_RD, interpret, programs=None) -> Callable:
    """Returns the call of a kernel, whose results have these shapes and the type of the rows."""
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, x_RD.dtype) for shape in shapes],
        grid=(programs or pl.cdiv(shapes[0][1], _width(shapes[0][1])),),
        name=name,
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=4),
    )


def _power(count: int) -> int:
    """Returns the least power of two that is not below `count` and not below `_LEAST`."""
    return max(_LEAST, 1 << (count - 1).bit_length())


def _width(count: int) -> int:
    """Returns the number of columns of a program, if there are `count` in all."""
    width = _WIDEST
    while width > _LEAST and pl.cdiv(count, width) < _PROGRAMS:
        width //= 2
    return width


@dataclasses.dataclass
class _Columns:
    """Columns of a program."""

    index: Array  # [N] int32
    valid: Array  # [N] bool

    @classmethod
    def of(cls, count: int) -> "_Columns":
        """Returns the columns of this program in a result of `count` columns."""
        width = _width(count)
        index = pl.program_id(0) * width + jnp.arange(width)
        return cls(index, index < count)


@dataclasses.dataclass
class _Rows:
    """Rows that a kernel reads, normalised if there is a norm."""

    x_ref: Array
    index: Array  # [M] int32, with M a power of two
    valid: Array  # [M] bool
    norm: Scale | None
    mean: Array  # [M] float32; 0 in an RMSNorm
    factor: Array  # [M] float32: inverse root of the mean square

    @classmethod
    def of(cls, x_ref, norm: Scale | None = None) -> "_Rows":
        """Returns all rows, with the statistics that their norm needs."""
        index = jnp.arange(_power(x_ref.shape[0]))
        zeros = jnp.zeros(index.shape, jnp.float32)
        rows = cls(x_ref, index, index < x_ref.shape[0], norm, zeros, zeros)
        if norm is not None:
            if norm.bias is not None:
                rows.mean = rows._mean(lambda x: x)
            square = rows._mean(lambda x: x * x)
            rows.factor = lax.rsqrt(square + norm.eps)
        return rows

    def at(self, ref, columns: _Columns):
        """Returns a reference to columns of these rows in an array of as many rows."""
        return ref.at[self.index[:, None], columns.index[None]]

    def mask(self, columns: _Columns) -> Array:
        """Returns which of the entries of `at` exist."""
        return self.valid[:, None] & columns.valid[None]

    def _chunk(self, start, count: int) -> tuple[Array, _Columns]:
        """Returns entries of the rows [M, count] as they are stored, and their columns."""
        index = start + jnp.arange(count)
        columns = _Columns(index, index < self.x_ref.shape[1])
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

    def _inputs(self, start) -> tuple[Array, _Columns]:
        """Returns entries [M, _DEPTH] of the rows after the norm, and their columns."""
        x, columns = self._chunk(start, _DEPTH)
        if self.norm is None:
            return x, columns
        wide = (x.astype(jnp.float32) - self.mean[:, None]) * self.factor[:, None]
        wide = wide * (self.norm.offset + _vector(self.norm.scale, columns)[None])
        if self.norm.bias is not None:
            wide = wide + _vector(self.norm.bias, columns)[None]
        return wide.astype(x.dtype), columns

    def times(self, matrices: Sequence[Matrix], columns: Sequence[_Columns]) -> list[Array]:
        """Returns the products [M, N] of the rows with some columns of each matrix."""
        dtype = self.x_ref.dtype

        def body(step, sums):
            x, inputs = self._inputs(step * _DEPTH)

            def product(matrix, own):
                weights = triton.load(
                    matrix.kernel.at[inputs.index[:, None], own.index[None]],
                    mask=inputs.valid[:, None] & own.valid[None],
                    other=0,
                )
                return triton.dot(x, weights.astype(dtype), precision=lax.Precision.HIGHEST)

            return [total + product(*pair) for total, *pair in zip(sums, matrices, columns)]

        zeros = [jnp.zeros((len(self.index), len(own.index)), jnp.float32) for own in columns]
        sums = lax.fori_loop(0, pl.cdiv(self.x_ref.shape[1], _DEPTH), body, zeros)
        results = []
        for total, matrix, own in zip(sums, matrices, columns):
            if matrix.size is not None:
                total = total * _vector(matrix.size, own)[None]
            total = total.astype(dtype)
            if matrix.bias is not None:
                total = total + _vector(matrix.bias, own)[None].astype(dtype)
            results.append(total)
        return results


def _vector(ref, columns: _Columns) -> Array:
    """Returns entries of a vector in float32."""
    return triton.load(ref.at[columns.index], mask=columns.valid, other=0.0).astype(jnp.float32)


def _normalised(pair, norm: Scale, column: Array, half: int) -> list[Array]:
    """Returns the halves of heads after their RMSNorm."""
    wide = [values.astype(jnp.float32) for values in pair]
    square = sum(jnp.sum(values * values, axis=1) for values in wide) / (2 * half)
    factor = lax.rsqrt(square + norm.eps)[:, None]
    normalised = []
    for index, values in enumerate(wide):
        scale = _vector(norm.scale, _Columns(column + index * half, column < half))
        normalised.append((values * factor * (norm.offset + scale[None])).astype(pair[0].dtype))
    return normalised


def _rotated(pair, rows: _Rows, angles, column: Array, half: int) -> list[Array]:
    """Returns the halves of heads, rotated against each other (`rope.rotate`)."""
    columns = _Columns(column, column < half)
    cos, sin = (
        triton.load(rows.at(angle, columns), mask=rows.mask(columns), other=0.0) for angle in angles
    )
    first, second = (values.astype(jnp.float32) for values in pair)
    rotated = first * cos - second * sin, second * cos + first * sin
    return [values.astype(pair[0].dtype) for values in rotated]
