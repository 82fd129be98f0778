"""Locations of parameters in the tensors of the Hugging Face layout, and their index arithmetic."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from spsjax.models.hf import head_rows
from spsjax.models.hf.head_rows import HeadRows


@dataclasses.dataclass(frozen=True)
class Part:
    """Share of a parameter in a tensor that several parameters of a layer may have in common.

    The tensor's outputs are groups, such as heads, and each group has the parts one after another.

    Attributes:
        tensor: name of the tensor within the layer.
        sizes: widths of the parts in one group; (): the tensor has this parameter alone.
        index: index of this part.
        is_filter: whether the tensor is that of a convolution per channel, [channels, 1, taps].
    """

    tensor: str
    sizes: tuple[int, ...] = ()
    index: int = 0
    is_filter: bool = False


@dataclasses.dataclass(frozen=True)
class TensorLocation:
    """Location of one parameter in the tensors of the layout.

    Attributes:
        names: names of the tensors: one, or one per expert.
        stacked: whether there is one tensor per index of the parameter's first axis.
        transposed: whether the tensors have the parameter's last two axes swapped.
        part: index of this parameter among those that share the tensor's last axis.
        num_parts: number of parameters that share the tensor's last axis.
        sizes: widths of these parameters in one group (`Part`); (): all have the width of this one,
            and there is one group.
        is_filter: whether the tensors have an axis of size 1 between their two axes.
        rows: rows of a parameter that has a matrix per head; None: it has not.
    """

    names: tuple[str, ...]
    stacked: bool
    transposed: bool
    part: int = 0
    num_parts: int = 1
    sizes: tuple[int, ...] = ()
    is_filter: bool = False
    rows: HeadRows | None = None

    def columns(self, width: int) -> np.ndarray:
        """Returns the indices of a parameter of this width in the last axis of the joined parts."""
        sizes = self.sizes or (width,) * self.num_parts
        group, column = np.divmod(np.arange(width), sizes[self.part])
        return sum(sizes[: self.part]) + group * sum(sizes) + column

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a tensor that has a part of this shape."""
        sizes = self.sizes or (shape[-1],) * self.num_parts
        whole = *shape[:-1], shape[-1] // sizes[self.part] * sum(sizes)
        whole = _swapped(whole) if self.transposed else whole
        return (whole[0], 1, *whole[1:]) if self.is_filter else whole

    def read(self, tensor, index: tuple[slice, ...], width: int) -> np.ndarray:
        """Returns a slice of the parameter from an unread tensor, which slices read.

        `width` is the size of the parameter's last axis.
        """
        columns = self.columns(width)[index[-1]]
        first, last = (columns[0], columns[-1] + 1) if len(columns) else (0, 0)
        index = *index[:-1], slice(int(first), int(last))
        index = _swapped(index) if self.transposed else index
        middle = (slice(None),) if self.is_filter else ()
        array = tensor[(*index[:1], *middle, *index[1:])]
        array = array[:, 0] if self.is_filter else array
        array = np.swapaxes(array, -1, -2) if self.transposed else array
        return array if len(columns) == last - first else array[..., columns - first]

    def joined(self, parts: dict[int, np.ndarray]) -> np.ndarray:
        """Returns the tensor of all its parts, by index."""
        sizes = self.sizes or (parts[0].shape[-1],) * self.num_parts
        groups = [
            parts[index].reshape(*parts[index].shape[:-1], -1, size)
            for index, size in enumerate(sizes)
        ]
        whole = np.concatenate(groups, axis=-1)
        whole = whole.reshape(*whole.shape[:-2], -1)
        whole = np.swapaxes(whole, -1, -2) if self.transposed else whole
        return np.ascontiguousarray(whole[:, None] if self.is_filter else whole)


def to_tensors(leaves: Iterable[tuple[TensorLocation, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by their names, from parameters and their locations."""
    parts_of: dict[str, dict[int, np.ndarray]] = {}  # by tensor name and index of the part
    per_head: dict[str, list] = {}  # by tensor name
    locations: dict[str, TensorLocation] = {}
    for location, array in leaves:
        if location.rows is not None:
            per_head.setdefault(location.names[0], []).append((location.rows, array))
            continue
        for name, part in zip(location.names, array if location.stacked else [array]):
            parts_of.setdefault(name, {})[location.part] = part
            locations[name] = location
    tensors = {name: locations[name].joined(parts) for name, parts in parts_of.items()}
    return tensors | {name: head_rows.joined(parts) for name, parts in per_head.items()}


def _swapped(axes: tuple) -> tuple:
    """Returns a tuple with its last two entries swapped."""
    return *axes[:-2], axes[-1], axes[-2]
