"""Weights of GGUF files as tensors of the Hugging Face layout."""

import math
import re
from collections.abc import Iterable

import gguf
import numpy as np

from spsjax.errors import InputError, short_repr
from spsjax.models.config import Config
from spsjax.models.gguf.header import Header, Tensor

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SUFFIXES = ".weight", ".bias"
# Tensors that are no parameters: frequencies, which the config has.
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
# Number of weights that are converted at a time. As float32 they take 16 MiB.
_CHUNK = 1 << 22


class Tensors:
    """Tensors of a GGUF file under their names in the Hugging Face layout.

    Args:
        header: header of the file.
        config: config of the model (`metadata.read_config`).
        dtype: type of the weights in memory.
    """

    def __init__(self, header: Header, config: Config, dtype):
        self.path, self._header, self._config, self._dtype = header.path, header, config, dtype
        self._architecture = header.metadata["general.architecture"]
        kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[self._architecture]
        self._names = gguf.get_tensor_name_map(kind, config.num_layers)

    def check(self, names: Iterable[str]) -> None:
        """Raises InputError if a tensor is missing, or if one would silently be ignored."""
        expected = {self._stored_name(name)[0] for name in names}
        stored = self._header.tensors.keys()
        for name in sorted(expected - stored):
            raise InputError(f"{self.path}: expected a tensor {name}, found none")
        for name in sorted(stored - expected):
            if not _IGNORED.fullmatch(name):
                model = f"architecture {self._architecture}"
                raise InputError(
                    f"{self.path}: expected no tensor {short_repr(name)} ({model}), found one"
                )

    def get(self, name: str, shape: tuple[int, ...]) -> "_Unread":
        """Returns an unread tensor; raises InputError if shape or type is wrong."""
        stored_name, expert = self._stored_name(name)
        tensor = self._header.tensors[stored_name]
        expected = shape if expert is None else (self._config.num_experts, *shape)
        if tensor.shape != expected:
            raise InputError(
                f"{self.path}: {stored_name}: expected shape {list(expected)}, "
                f"found {list(tensor.shape)}"
            )
        data = tensor.data if expert is None else tensor.data[expert]
        _check_type(self._header, tensor)
        # In files, the scale of a norm includes the constant that is added to it.
        is_norm = len(shape) == 1 and name.endswith("norm.weight")
        offset = self._config.norm_offset if is_norm else 0.0
        return _Unread(tensor, data, self._order(name), offset, self._dtype)

    def _stored_name(self, name: str) -> tuple[str, int | None]:
        """Returns the name of a tensor in the file, and the expert if it has those of all."""
        expert = _EXPERT.search(name)
        stored = self._names.get_name(_EXPERT.sub(".experts.", name), _SUFFIXES)
        return stored or name, expert and int(expert[1])

    def _order(self, name: str) -> np.ndarray | None:
        """Returns the row in the file of each row of a tensor; None: the same.

        llama.cpp rotates neighbours in the architecture "llama", so that number i of the first half
        of a head, and of the second half, are at 2i and 2i + 1 in files.
        """
        config, module = self._config, name.rpartition(".")[0]
        heads = {
            "q_proj": config.num_heads,
            "k_proj": config.num_kv_heads,
        }.get(module.rpartition(".")[2])
        if heads is None or self._architecture != "llama":
            return None
        rows = np.arange(heads * config.head_dim)
        return rows.reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).ravel()


def _check_type(header: Header, tensor: Tensor) -> None:
    """Raises InputError if the library cannot dequantise a tensor."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.type)
    except NotImplementedError:
        raise InputError(
            f"{header.path}: {tensor.name}: expected a type of weights such as F16 or Q4_K, "
            f"found {tensor.type.name}"
        ) from None


class _Unread:
    """A matrix or a vector in a file, which is dequantised when it is indexed.

    Args:
        tensor: tensor of the file.
        data: its bytes by row, or those of one expert.
        order: row in the file of each row; None: the same.
        offset: constant to subtract.
        dtype: type of what an index returns.
    """

    def __init__(self, tensor: Tensor, data, order, offset: float, dtype):
        self._type, self._order, self._offset, self._dtype = tensor.type, order, offset, dtype
        self._data = data if data.ndim > 1 else data[None]
        self._is_matrix, self._width = data.ndim > 1, tensor.shape[-1]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a slice of the tensor."""
        if not self._is_matrix:
            return self._converted(slice(None), *index)[0]
        rows, columns = index
        first, last, _ = rows.indices(len(self._data))
        chosen = np.empty((last - first, len(range(self._width)[columns])), self._dtype)
        step = max(1, _CHUNK // self._width)
        for start in range(first, last, step):
            chunk = slice(start, min(start + step, last))
            order = chunk if self._order is None else self._order[chunk]
            chosen[start - first : chunk.stop - first] = self._converted(order, columns)
        return chosen

    def _converted(self, rows, columns: slice) -> np.ndarray:
        data = np.asarray(self._data[rows])
        # The library works on 16 rows at a time. Longer ones take half the time.
        joined = data.reshape(len(data) // math.gcd(len(data), 16), -1)
        weights = gguf.quants.dequantize(joined, self._type).reshape(len(data), -1)[:, columns]
        return (weights - self._offset if self._offset else weights).astype(self._dtype)
