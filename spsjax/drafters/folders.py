"""Folders of drafters: a config.json and tensors, in the layout of each method.

The module of a drafter that can be saved has a `LAYOUT`.
"""

import abc
import dataclasses
import json
import pathlib
from collections.abc import Callable, Set
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.typing import DTypeLike

from spsjax.drafters.features import FeatureDrafter
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import weights
from spsjax.models.hf.fields import COUNT, Fields, read_json
from spsjax.models.hf.locations import TensorLocation, to_tensors
from spsjax.types import Array, PyTree
from spsjax.utils import atomic_files


@dataclasses.dataclass(frozen=True)
class Folder:
    """Content of a folder.

    Attributes:
        path: path of the folder.
        raw: content of config.json.
        stored: file of each tensor, by the tensor's name.
    """

    path: pathlib.Path
    raw: dict
    stored: dict[str, pathlib.Path]

    @property
    def fields(self) -> Fields:
        return Fields(self.path / "config.json", self.raw)


D = TypeVar("D", bound=FeatureDrafter)


class Layout(abc.ABC, Generic[D]):
    """Layout of a method's tensors and config.json; a published layout where there is one.

    Attributes:
        file: name of the file with the tensors.
        optional: names of tensors that are 0 if they are missing.
        in_target: whether the folder of the target itself may hold the drafter, which is then
            loaded by the name of its method.
    """

    in_target: bool = False
    file: str = weights.SINGLE
    optional: Set[str] = frozenset()

    @abc.abstractmethod
    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        """Returns whether a folder has this layout, by its config.json and names of tensors."""

    @abc.abstractmethod
    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        """Returns the fields of the drafter except `target`.

        Raises InputError if the folder is of a drafter for another target.
        """

    @abc.abstractmethod
    def name(self, drafter: D, path: tuple, stored: Set[str]) -> str:
        """Returns the name of the tensor of the parameter at a path.

        `stored` are the names in the folder, for layouts with several names per tensor.
        """

    def location(self, drafter: D, path: tuple, stored: Set[str]) -> TensorLocation:
        """Returns where the parameter at a path is stored: for most, the tensor `name`."""
        name = self.name(drafter, path, stored)
        return TensorLocation((name,), stacked=False, transposed=is_transposed(path))

    @abc.abstractmethod
    def to_json(self, drafter: D, target_name: str, dtype: str) -> dict:
        """Returns the config.json of a drafter."""

    def is_copy(self, name: str, drafter: D) -> bool:
        """Returns whether a tensor follows from others, so that it need not be read."""
        return False

    def constants(self, folder: Folder, drafter: D) -> dict[str, np.ndarray]:
        """Returns the parameters that are not trained."""
        return {}

    def tensor(
        self, folder: Folder, drafter: D, file: Any, name: str, shape: tuple[int, ...]
    ) -> np.ndarray:
        """Returns a tensor of an open file; raises InputError unless it has the expected shape."""
        return weights.checked(file, folder.stored[name], name, shape)[...]

    def difference(self, folder: Folder, target_params: PyTree) -> str | None:
        """Returns the name of an unused tensor that differs from the target's; None: there is none.

        The loader warns of it, because the drafter was trained with that tensor.
        """
        return None

    def open(self, path: pathlib.Path) -> Folder:
        """Reads a folder's config.json and the names of its tensors."""
        raw = read_json(path / "config.json")
        if self.file == weights.SINGLE:
            return Folder(path, raw, weights.shards(path))
        file = path / self.file
        if not file.is_file():
            raise InputError(f"{path}: expected {self.file}, found none. Convert a .pt file to it")
        return Folder(path, raw, dict.fromkeys(weights.open_all([file])[file].keys(), file))

    def read(
        self,
        folder: Folder,
        drafter: D,
        dtype: DTypeLike,
        sharding_of: Callable[[tuple], jax.sharding.Sharding],
    ) -> PyTree:
        """Reads a drafter's parameters.

        Args:
            folder: result of `open`.
            drafter: drafter whose parameters are read.
            dtype: type of the parameters.
            sharding_of: function from a parameter's path to its sharding.

        Raises:
            InputError: files or tensors are missing, damaged or of another drafter.
        """
        stored = folder.stored
        # Before the shapes, which take minutes to compute for a wrong number of layers.
        layers = getattr(getattr(drafter, "config", None), "num_layers", 0)
        if layers > len(stored):
            raise InputError(
                f"{folder.path}: expected tensors of {layers} layers (config.json), "
                f"found {len(stored)} tensors in all"
            )
        shapes = drafter.param_shapes(dtype)
        locations = self.locations(drafter, shapes, stored.keys())
        missing = self.optional - stored.keys()
        names = {name for location in locations.values() for name in location.names}
        check_names(folder, names - missing, lambda name: self.is_copy(name, drafter))
        files = weights.open_all(set(stored.values()))
        constants = self.constants(folder, drafter)

        def get(name: str, shape: tuple[int, ...]) -> np.ndarray:
            return self.tensor(folder, drafter, files[stored[name]], name, shape)

        def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> Array:
            path = _keys(path)
            where = sharding_of(path)
            if path[0] in constants:
                return jax.device_put(constants[path[0]].astype(shape.dtype), where)
            if missing.intersection(locations[path].names):
                return jax.device_put(jnp.zeros(shape.shape, shape.dtype), where)
            return weights.read_leaf(get, locations[path], shape.shape, shape.dtype, where)

        return jax.tree_util.tree_map_with_path(leaf, shapes)

    def tensors(self, drafter: D, params: PyTree, dtype: DTypeLike) -> dict[str, np.ndarray]:
        """Returns the tensors of a folder by their names."""
        return self.located(drafter, params, dtype, frozenset())

    def located(
        self, drafter: D, params: PyTree, dtype: DTypeLike, stored: Set[str]
    ) -> dict[str, np.ndarray]:
        """Returns the tensors by their names, in the layout that the names `stored` have."""
        arrays, types = _by_path(params), _by_path(drafter.param_shapes(dtype))
        locations = self.locations(drafter, params, stored)
        return to_tensors(
            (location, np.asarray(arrays[path]).astype(types[path].dtype))
            for path, location in locations.items()
        )

    def locations(
        self, drafter: D, params: PyTree, stored: Set[str]
    ) -> dict[tuple, TensorLocation]:
        """Returns where each parameter is stored, by its path, constants excluded."""
        paths = (path for path in _by_path(params) if path[0] not in drafter.constants)
        return {path: self.location(drafter, path, stored) for path in paths}

    def write(
        self,
        path: pathlib.Path,
        drafter: D,
        params: PyTree,
        target_name: str,
        dtype: DTypeLike = "bfloat16",
    ) -> None:
        """Writes config.json and the tensors to a folder, each file atomically.

        Args:
            path: output folder.
            drafter: drafter to save.
            params: parameters on the host.
            target_name: name of the target, as information for users of the folder.
            dtype: type of the stored weights.
        """
        raw = self.to_json(drafter, target_name, jnp.dtype(dtype).name)
        tensors = self.tensors(drafter, params, dtype)
        path.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path / "config.json", json.dumps(raw, indent=2) + "\n")
        with atomic_files.atomic_write(path / self.file) as partial:
            safetensors.numpy.save_file(tensors, partial, metadata={"format": "pt"})


def check_names(folder: Folder, expected: Set[str], is_spare: Callable[[str], bool]) -> None:
    """Raises InputError if a tensor is missing, or if a tensor would silently be ignored."""
    for name in sorted(expected - folder.stored.keys()):
        raise InputError(f"{folder.path}: expected a tensor {name}, found none")
    for name in sorted(folder.stored.keys() - expected):
        if not is_spare(name):
            raise InputError(f"{folder.path}: expected no tensor {name} (config.json), found one")


def check_sizes(folder: Folder, target: Config) -> None:
    """Raises InputError if a config.json states sizes of another target."""
    for name, wanted in (
        ("emb_dim", {target.d_model}),
        ("hidden_size", {target.d_model}),
        ("vocab_size", {target.vocab_size, target.vocab_rows}),
    ):
        size = folder.fields.get(name, COUNT, None)
        if size is not None and size not in wanted:
            raise InputError(
                f"{folder.path / 'config.json'}: expected a drafter for a target with {name} "
                f"{max(wanted)}, found {size}"
            )


class OwnLayout(Layout[D]):
    """Layout of methods whose authors have published none.

    Tensors have the names of the parameters. config.json has the drafter's fields in `kinds`.

    Attributes:
        method: name of the method.
        kinds: kind of each field (`models.hf.fields`), by the field's name.
    """

    def __init__(self, method: str, kinds: dict[str, tuple]) -> None:
        self.method, self.kinds = method, kinds

    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        return raw.get("model_type") == self.method

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        check_sizes(folder, target)
        return {name: folder.fields.get(name, kind) for name, kind in self.kinds.items()}

    def name(self, drafter: D, path: tuple, stored: Set[str]) -> str:
        return f"{'.'.join(map(str, path[:-1]))}.{kind_of(path)}"

    def to_json(self, drafter: D, target_name: str, dtype: str) -> dict:
        target = drafter.target
        sizes = {"hidden_size": target.d_model, "vocab_size": target.vocab_rows}
        fields = {name: getattr(drafter, name) for name in self.kinds}
        return sizes | {"model_type": self.method} | fields | {"torch_dtype": dtype}


def kind_of(path: tuple) -> str:
    """Returns the last part of a tensor's name."""
    return "bias" if path[-1] == "bias" else "weight"


def is_transposed(path: tuple) -> bool:
    """Returns whether the tensor of a parameter is stored transposed, as PyTorch does."""
    return path[-1] == "kernel"


def _keys(path: tuple) -> tuple:
    return tuple(entry.key for entry in path)


def _by_path(params: PyTree) -> dict[tuple, Any]:
    """Returns the leaves of nested dicts by their paths."""
    return {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
