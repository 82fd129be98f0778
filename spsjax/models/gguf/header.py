"""Headers of GGUF files: metadata, and the name, type, shape and location of each tensor.

The format is described in ggml's docs/gguf.md. The library `gguf` has a reader, too, which makes
NumPy arrays of every number and text: for 49,152 tokens 5 s, and this module takes 0.1 s (one core
of an AMD EPYC).
"""

import dataclasses
import math
import pathlib
import struct

import gguf
import numpy as np

from spsjax.errors import InputError, one_line, short_repr
from spsjax.utils import git_lfs

_MAGIC = b"GGUF"
_VERSIONS = 2, 3
_ALIGNMENT = 32  # of a tensor's first byte, without `general.alignment`
# Formats of `struct`, by the number of a scalar type.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_LENGTH = struct.Struct("<Q")  # of a text
_MOST_AXES = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """Location of a tensor in a file.

    Attributes:
        name: name in the file.
        type: type of its elements or blocks.
        shape: shape, the axis of adjacent elements last.
        data: bytes of each row, [..., bytes per row] uint8, which are read when they are used.
    """

    name: str
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Header:
    """Content of a GGUF file, with unread tensors.

    Attributes:
        path: path of the file.
        metadata: values by key: numbers, flags, texts, and lists of them.
        tensors: tensors by name.
    """

    path: pathlib.Path
    metadata: dict[str, object]
    tensors: dict[str, Tensor]


def read(path: pathlib.Path) -> Header:
    """Reads the header of a GGUF file.

    Raises InputError if the file is of another kind, damaged or cut off, or if it is big-endian, of
    an unknown version, or one part of several.
    """
    try:
        with path.open("rb") as file:
            start = file.read(100)
        git_lfs.check(path, start)
        _check_kind(path, start)
        reader = _Reader(path, np.memmap(path, np.uint8, mode="r"))
    except OSError as error:
        raise InputError(f"{path}: expected a GGUF file, found {one_line(error)}") from None
    num_tensors, num_values = reader.number("Q"), reader.number("Q")
    metadata: dict[str, object] = {}
    for _ in range(num_values):
        key = reader.text()
        if key in metadata:
            raise reader.error(f"each key once, found {short_repr(key)} twice")
        metadata[key] = reader.value(reader.number("I"))
    if metadata.get("split.count", 0) not in (0, 1):
        raise reader.error(
            f"a whole model, found one of {short_repr(metadata['split.count'])} files. "
            "Join them: llama-gguf-split --merge"
        )
    return Header(path, metadata, _tensors(reader, num_tensors, metadata))


def _check_kind(path: pathlib.Path, start: bytes) -> None:
    """Raises InputError unless a file begins as a GGUF file that can be read."""
    if start[:4] != _MAGIC:
        raise InputError(f"{path}: expected a GGUF file, found a file of another kind")
    if len(start) < 8:
        raise InputError(f"{path}: expected a whole GGUF file, found its first {len(start)} bytes")
    (version,) = struct.unpack_from("<I", start, 4)
    # Read in the wrong order of bytes, a small number has zeros in its lower half.
    if version and version & 0xFFFF == 0:
        raise InputError(f"{path}: expected a little-endian GGUF file, found a big-endian one")
    if version not in _VERSIONS:
        known = " or ".join(map(str, _VERSIONS))
        raise InputError(f"{path}: expected GGUF version {known}, found {version}")


class _Reader:
    """Position in the bytes of a header.

    Args:
        path: path of the file, for messages.
        data: bytes of the file.
    """

    def __init__(self, path: pathlib.Path, data: np.ndarray):
        self.path, self.data, self.bytes = path, data, data.data
        self.position = 8  # after magic and version

    def error(self, expected: str) -> InputError:
        """Returns an error about the file."""
        return InputError(f"{self.path}: expected {expected}")

    def take(self, count: int) -> memoryview:
        """Returns the next bytes; raises InputError if the file ends before them."""
        start, self.position = self.position, self.position + count
        if self.position > len(self.bytes):
            raise self.error(
                f"a whole GGUF file, found one that ends within its header, "
                f"after {len(self.bytes):,} bytes"
            )
        return self.bytes[start : self.position]

    def number(self, code: str):
        """Returns the next number, of a format of `struct`."""
        code = f"<{code}"
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        """Returns the next text."""
        raw = bytes(self.take(_LENGTH.unpack(self.take(8))[0]))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"texts in UTF-8, found {short_repr(raw)}") from None

    def value(self, kind: int):
        """Returns the next value of metadata, of the type with this number."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind == _STRING:
                return [self.text() for _ in range(count)]
            dtype = np.dtype(self._format(kind)).newbyteorder("<")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        value = self.number(self._format(kind))
        # The shortest decimal number that stands for it, as config files have it: 1e-05.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.error(f"values of a known type, found type {kind}")
        return _SCALARS[kind]


def _tensors(reader: _Reader, count: int, metadata: dict[str, object]) -> dict[str, Tensor]:
    """Returns the tensors, whose list is next; raises InputError for one that cannot be read."""
    entries = []
    for _ in range(count):
        name, num_axes = reader.text(), reader.number("I")
        if not 1 <= num_axes <= _MOST_AXES:
            raise reader.error(f"1 to {_MOST_AXES} axes of {short_repr(name)}, found {num_axes}")
        shape = tuple(reader.number("Q") for _ in range(num_axes))[::-1]
        if 0 in shape:
            raise reader.error(f"elements of {short_repr(name)}, found shape {list(shape)}")
        entries.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise reader.error(f"a positive general.alignment, found {short_repr(alignment)}")
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise reader.error(f"each tensor once, found {short_repr(name)} twice")
        tensors[name] = _tensor(reader, name, shape, kind, start + offset)
    return tensors


def _tensor(reader: _Reader, name: str, shape: tuple[int, ...], kind: int, start: int) -> Tensor:
    try:
        type_ = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise reader.error(f"a known type of {short_repr(name)}, found type {kind}") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    if shape[-1] % block:
        raise reader.error(
            f"rows of {short_repr(name)} in blocks of {block} ({type_.name}), "
            f"found rows of {shape[-1]}"
        )
    row_bytes = shape[-1] // block * block_bytes
    stop = start + math.prod(shape[:-1]) * row_bytes
    if stop > len(reader.data):
        raise reader.error(
            f"a whole GGUF file, found one that ends within the tensor {short_repr(name)}, "
            f"after {len(reader.data):,} bytes"
        )
    return Tensor(name, type_, shape, reader.data[start:stop].reshape(*shape[:-1], row_bytes))
