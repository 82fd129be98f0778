"""Products of a feed-forward network and of an output projection, with what surrounds them."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.experimental.pallas import triton

from spsjax.models.fused.rows import Columns, Matrix, Rows, Scale, call
from spsjax.types import Array


def added(x_RD: Array, matrix: Matrix, stream_RF: Array, interpret: bool = False) -> Array:
    """Returns the residual stream [R, F] plus the products of rows with a matrix."""

    def kernel(x_ref, matrix, stream_ref, out_ref):
        rows, columns = Rows.of(x_ref), Columns.of(out_ref.shape[1])
        product = rows.times([matrix], [columns])[0]
        at = rows.at(out_ref, columns)
        stream = triton.load(rows.at(stream_ref, columns), mask=rows.mask(columns), other=0.0)
        triton.store(at, stream + product, mask=rows.mask(columns))

    return call("added", kernel, [stream_RF.shape], x_RD, interpret)(x_RD, matrix, stream_RF)[0]


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
        rows, columns = Rows.of(x_ref, norm), Columns.of(out_ref.shape[1])
        first, *rest = rows.times(matrices, [columns] * len(matrices))
        hidden = activation(first.astype(jnp.float32)).astype(first.dtype)
        hidden = hidden * rest[0] if rest else hidden
        triton.store(rows.at(out_ref, columns), hidden, mask=rows.mask(columns))

    shape = len(x_RD), matrices[0].kernel.shape[1]
    return call("activated", kernel, [shape], x_RD, interpret)(x_RD, norm, list(matrices))[0]
