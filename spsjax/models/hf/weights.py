"""Weights of model folders in the Hugging Face layout: reading and writing of safetensors.

`families` maps parameters to tensors.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from spsjax.errors import InputError, one_line, short_repr
from spsjax.models import transformer
from spsjax.models.hf import config_json, families
from spsjax.models.hf.fields import OBJECT, Fields, read_json
from spsjax.models.hf.locations import TensorLocation, to_tensors
from spsjax.parallel import sharding
from spsjax.types import PyTree
from spsjax.utils import atomic_files, git_lfs

read_config = config_json.read
SINGLE, INDEX, _PICKLES = "model.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*"
PICKLE = (
    "a pickle, which can run any code. Convert it: safetensors.torch.save_file("
    'torch.load("pytorch_model.bin", weights_only=True), "model.safetensors")'
)
_TYPES = "BF16", "F16", "F32", "F64"


def _leaves(tree: PyTree) -> Iterator[tuple[tuple, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(entry.key for entry in path), leaf


def shards(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the file of each tensor, by tensor name.

    A single file takes precedence over shards, as in transformers.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single)
    if not index.exists():
        others = f"pytorch_model.bin, {PICKLE}" if list(folder.glob(_PICKLES)) else "neither"
        raise InputError(f"{folder}: expected {SINGLE} or its index, found {others}")
    return {name: folder / file for name, file in read_index(index).items()}


def read_index(index: pathlib.Path) -> dict[str, str]:
    """Returns the file name of each tensor, by tensor name, from an index of shards."""
    weight_map = Fields(index, read_json(index)).get("weight_map", OBJECT)
    for name, file in weight_map.items():
        # A path could lead out of the folder.
        if not isinstance(file, str) or file != pathlib.PurePath(file).name:
            raise InputError(f"{index}: {name}: expected a file name, found {short_repr(file)}")
    return weight_map


def _open(path: pathlib.Path):
    """Opens a safetensors file; raises InputError if that fails."""
    try:
        if not path.is_file():
            raise InputError(f"{path}: expected a safetensors file, found none")
        with path.open("rb") as file:  # the library reports an unreadable file as missing
            git_lfs.check(path, file.read(100))
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: expected a whole safetensors file, found {one_line(error)}"
        ) from None


class Tensors(Protocol):
    """Tensors of a model under their names in the Hugging Face layout."""

    def check(self, names: Iterable[str]) -> None:
        """Raises InputError unless these are the names of the model's tensors."""

    def get(self, name: str, shape: tuple[int, ...]):
        """Returns an unread tensor, which slices read; raises InputError if it does not fit."""


@dataclasses.dataclass(frozen=True)
class _FolderTensors:
    """Tensors of a model folder.

    Attributes:
        folder: the folder.
        config: config of the model.
        family: family of the model.
        stored_names: names in the files, by the family's usual names.
        shards: file of each tensor, by name in the files.
        files: opened files, by path.
        contents: names of the tensors in each file, by path.
    """

    folder: pathlib.Path
    config: transformer.Config
    family: families.Family
    stored_names: dict[str, str]
    shards: dict[str, pathlib.Path]
    files: dict[pathlib.Path, Any]
    contents: dict[pathlib.Path, set[str]]

    def check(self, names: Iterable[str]) -> None:
        """Raises InputError unless these are the names of the model's tensors."""
        names = set(names)
        held = [name for name in self.stored_names if name in names or not self._is_empty(name)]
        _check_names(self.folder, self.config, held, names, self.family)
        if self.config.tie_embeddings and "lm_head.weight" in self.stored_names:
            shape = (self.config.vocab_rows, self.config.d_model)
            embedding = f"{self.family.other_names['embed']}.weight"
            head, embedding = self.get("lm_head.weight", shape), self.get(embedding, shape)
            _check_tied_head(self.folder, head, embedding)

    def _is_empty(self, name: str) -> bool:
        """Returns whether a tensor has no numbers, as those of shared experts that are none."""
        stored = self.stored_names[name]
        shard = self.shards[stored]
        return (
            stored in self.contents[shard] and 0 in self.files[shard].get_slice(stored).get_shape()
        )

    def get(self, name: str, shape: tuple[int, ...]):
        """Returns an unread tensor; raises InputError if shape or type is wrong."""
        name = self.stored_names[name]
        shard = self.shards[name]
        if name not in self.contents[shard]:
            raise InputError(f"{shard}: expected a tensor {name}, found none")
        return checked(self.files[shard], shard, name, shape)


def checked(file, path: pathlib.Path, name: str, shape: tuple[int, ...]):
    """Returns an unread tensor; raises InputError if shape or type is wrong."""
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != shape:
        raise InputError(
            f"{path}: {name}: expected shape {list(shape)}, found {stored.get_shape()}"
        )
    if stored.get_dtype() not in _TYPES:
        raise InputError(
            f"{path}: {name}: expected floating-point weights of 16 bits or more, "
            f"found {stored.get_dtype()}"
        )
    return stored


def open_all(paths: Iterable[pathlib.Path]) -> dict[pathlib.Path, Any]:
    """Returns opened safetensors files by path; raises InputError for a damaged file."""
    return {path: _open(path) for path in paths}


def _stored_names(
    folder: pathlib.Path, names: Iterable[str], family: families.Family
) -> dict[str, str]:
    """Returns the names in the files by the family's usual names.

    Raises InputError if two names belong to one tensor.
    """
    stored: dict[str, str] = {}
    for name in names:
        other = stored.setdefault(family.canonical(name), name)
        if other != name:
            raise InputError(f"{folder}: expected a tensor once, found {other} and {name}")
    return stored


def _check_count(
    folder: pathlib.Path, config: transformer.Config, count: int, is_fused: bool
) -> None:
    """Raises InputError if there are fewer tensors than layers times experts.

    It runs before other checks: for a wrong config.json with a million layers, the shapes alone
    would take minutes to compute. `is_fused` says whether a tensor may have several experts.
    """
    period = len(config.changes) or 1
    experts = sum(max(config.layer(layer).num_experts, 1) for layer in range(period))
    experts = period if is_fused else experts
    if config.num_layers * experts // period > count:
        experts = f" of {config.num_experts} experts" if config.num_experts else ""
        raise InputError(
            f"{folder}: expected tensors of {config.num_layers} layers{experts} (config.json), "
            f"found {count} tensors in all"
        )


def _check_names(
    folder: pathlib.Path,
    config: transformer.Config,
    names: Iterable[str],
    expected: Iterable[str],
    family: families.Family,
) -> None:
    """Raises InputError if a tensor is missing, or if a tensor would silently be ignored."""
    names, expected = set(names), set(expected)
    for name in sorted(expected - names):
        raise InputError(f"{folder}: expected a tensor {name}, found none")
    further = family.further_layers(config.num_layers, names)
    for name in sorted(names - expected):
        # Some files have a head that is tied to the embedding.
        is_ignored = re.fullmatch(family.ignored, name) or name.startswith(further)
        if name != "lm_head.weight" and not is_ignored:
            raise InputError(f"{folder}: expected no tensor {name} (config.json), found one")


def _check_tied_head(folder: pathlib.Path, head, embedding, rows: int = 4096) -> None:
    """Raises InputError if a stored head differs from the embedding that it is tied to.

    The tensors are compared in slices of `rows` rows, which take little memory.
    """
    count = head.get_shape()[0]
    for start in range(0, count, rows):
        index = slice(start, min(start + rows, count))
        if not np.array_equal(head[index], embedding[index]):
            raise InputError(
                f"{folder}: lm_head.weight: expected the embedding (tie_word_embeddings, "
                "config.json), found another tensor"
            )


def read_params(
    folder: pathlib.Path,
    config: transformer.Config,
    dtype,
    sharding_of: Callable[[tuple], jax.sharding.Sharding] | None = None,
    convert: Callable[[tuple, jax.Array], PyTree] | None = None,
) -> PyTree:
    """Reads the parameters of a model folder, for each device only its slices.

    Args:
        folder: model folder.
        config: config of the model, from `read_config`.
        dtype: type of the parameters in memory.
        sharding_of: function from a parameter's path to its sharding (`sharding.param_shardings`);
            None: the default device.
        convert: function of each parameter's path and array that returns its replacement, such as
            a quantised matrix; None: no conversion.

    Raises:
        InputError: files or tensors are missing, damaged or of another model.
    """
    family = families.FAMILIES[config_json.family_of(config)]
    shard_of = shards(folder)
    stored_names = _stored_names(folder, shard_of, family)
    _check_count(folder, config, len(shard_of), bool(family.alternatives(config)))
    files = open_all(set(shard_of.values()))
    contents = {path: set(file.keys()) for path, file in files.items()}
    tensors = _FolderTensors(
        folder, config, family, stored_names, shard_of, files=files, contents=contents
    )
    return read_tensors(tensors, config, dtype, sharding_of, convert, stored_names)


def read_tensors(
    tensors: Tensors,
    config: transformer.Config,
    dtype,
    sharding_of: Callable[[tuple], jax.sharding.Sharding] | None = None,
    convert: Callable[[tuple, jax.Array], PyTree] | None = None,
    stored: Container[str] = (),
) -> PyTree:
    """Reads the parameters of a model, one at a time, as `read_params` does.

    `stored` are the tensors' names, for families that have several layouts.
    """
    sharding_of = sharding_of or sharding.param_shardings(None, config)
    name = config_json.family_of(config)
    shapes = transformer.param_shapes(config, dtype)
    locations = {path: families.locate(name, config, path, stored) for path, _ in _leaves(shapes)}
    tensors.check({tensor for location in locations.values() for tensor in location.names})

    def read(path, leaf):
        path = tuple(entry.key for entry in path)
        leaf = read_leaf(tensors.get, locations[path], leaf.shape, leaf.dtype, sharding_of(path))
        return leaf if convert is None else convert(path, leaf)

    return jax.tree_util.tree_map_with_path(read, shapes)


def read_leaf(
    get: Callable[[str, tuple[int, ...]], Any],
    location: TensorLocation,
    shape: tuple[int, ...],
    dtype,
    target: jax.sharding.Sharding,
) -> jax.Array:
    """Reads one parameter, for each device only its slice; `get` is that of `Tensors`."""
    if location.rows is not None:
        stored = get(location.names[0], location.rows.stored_shape(shape))
        return location.rows.read(stored, shape, dtype, target)
    one = shape[1:] if location.stacked else shape
    stored = [get(name, location.stored_shape(one)) for name in location.names]

    def read_slice(index):
        chosen = stored
        if location.stacked:
            chosen, index = stored[index[0]], index[1:]
        slices = [location.read(tensor, index, one[-1]) for tensor in chosen]
        slices = [array.astype(dtype, copy=False) for array in slices]
        return np.stack(slices) if location.stacked else slices[0]

    return jax.make_array_from_callback(shape, target, read_slice)


def save(folder: str | pathlib.Path, config: transformer.Config, params: PyTree, dtype="bfloat16"):
    """Writes `config.json` and `model.safetensors`, each of them atomically.

    Raises InputError if the layout cannot express the config.
    """
    folder = pathlib.Path(folder)
    family = config_json.family_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    types = dict(_leaves(transformer.param_shapes(config, dtype)))
    tensors = to_tensors(
        (families.locate(family, config, path), np.asarray(jnp.asarray(leaf, types[path].dtype)))
        for path, leaf in _leaves(params)
    )
    # The config is written first, because `config_json.write` may refuse it.
    config_json.write(folder, config, jnp.dtype(dtype).name)
    with atomic_files.atomic_write(folder / SINGLE) as partial:
        safetensors.numpy.save_file(tensors, partial, metadata={"format": "pt"})
    # A generation config of another model would override the end-of-sequence ids.
    (folder / "generation_config.json").unlink(missing_ok=True)
