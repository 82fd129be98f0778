"""Tensors in which several parameters with a matrix per head share the rows of each head."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class HeadRows(NamedTuple):
    """Rows of one parameter [H, in, out] in a tensor [H * total, width].

    Attributes:
        first: first row of the parameter among those of a head.
        rows: number of its rows per head.
        total: number of rows per head.
        transposed: whether the tensor's rows are the outputs of the parameter.
    """

    first: int
    rows: int
    total: int
    transposed: bool

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape of the tensor that has a parameter of this shape."""
        return shape[0] * self.total, shape[1] if self.transposed else shape[2]

    def read(self, stored: Any, shape: tuple[int, ...], dtype, target) -> jax.Array:
        """Reads the parameter from an unread tensor, for each device of a sharding its slice."""

        def read_slice(index):
            start, stop, _ = index[0].indices(shape[0])
            array = stored[start * self.total : stop * self.total].astype(dtype, copy=False)
            array = array.reshape(stop - start, self.total, -1)
            array = array[:, self.first : self.first + self.rows]
            array = array.swapaxes(1, 2) if self.transposed else array
            return array[(slice(None), *index[1:])]

        return jax.make_array_from_callback(shape, target, read_slice)


def joined(parts: Sequence[tuple[HeadRows, np.ndarray]]) -> np.ndarray:
    """Returns the tensor [H * total, width] of all parameters that share it."""
    in_order = sorted(parts, key=lambda part: part[0].first)
    arrays = [array.swapaxes(1, 2) if rows.transposed else array for rows, array in in_order]
    tensor = np.concatenate(arrays, axis=1)
    return tensor.reshape(-1, tensor.shape[-1])
