"""Folders of drafters: a config.json and tensors, in the layout of each method.

The module of a drafter that can be saved has a `LAYOUT`.
"""

import abc
import dataclasses
import json
import pathlib
from collections.abc import Callable, Set

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from spsjax.drafters.features import FeatureDrafter
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import weights
from spsjax.models.hf.fields import COUNT, Fields, read_json
from spsjax.types import PyTree
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


class Layout(abc.ABC):
    """Layout of a method's tensors and config.json; a published layout where there is one.

    Attributes:
        file: name of the file with the tensors.
    """

    file: str = weights.SINGLE

    @abc.abstractmethod
    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        """Returns whether a folder has this layout, by its config.json and names of tensors."""

    @abc.abstractmethod
    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, object]:
        """Returns the fields of the drafter except `target`.

        Raises InputError if the folder is of a drafter for another target.
        """

    @abc.abstractmethod
    def names(
        self, drafter: FeatureDrafter, params: PyTree, stored: Set[str] = frozenset()
    ) -> dict[tuple, tuple[str, bool]]:
        """Returns each tensor's name and whether it is stored transposed, by parameter path.

        `stored` are the names in the folder, for layouts with several names per tensor.
        """

    @abc.abstractmethod
    def to_json(self, drafter: FeatureDrafter, target_name: str, dtype: str) -> dict:
        """Returns the config.json of a drafter."""

    def is_copy(self, name: str, drafter: FeatureDrafter) -> bool:
        """Returns whether a tensor is a copy of another tensor, so that it need not be read."""
        return False

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
        drafter: FeatureDrafter,
        dtype,
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
        shapes = drafter.param_shapes(dtype)
        names = self.names(drafter, shapes, folder.stored.keys())
        expected = {name for name, _ in names.values()}
        check_names(folder, expected, lambda name: self.is_copy(name, drafter))
        files = weights.open_all(set(folder.stored.values()))

        def leaf(path, shape):
            path = tuple(entry.key for entry in path)
            name, transposed = names[path]
            file = folder.stored[name]
            wanted = shape.shape[::-1] if transposed else shape.shape
            array = weights.checked(files[file], file, name, wanted)[...]
            array = (array.T if transposed else array).astype(shape.dtype)
            return jax.device_put(array, sharding_of(path))

        return jax.tree_util.tree_map_with_path(leaf, shapes)

    def tensors(self, drafter: FeatureDrafter, params: PyTree, dtype) -> dict[str, np.ndarray]:
        """Returns the tensors of a folder by their names."""
        tensors = {}
        for path, (name, transposed) in self.names(drafter, params).items():
            array = params
            for entry in path:
                array = array[entry]
            array = np.asarray(array).astype(dtype)
            tensors[name] = np.ascontiguousarray(array.T if transposed else array)
        return tensors

    def write(
        self,
        path: pathlib.Path,
        drafter: FeatureDrafter,
        params: PyTree,
        target_name: str,
        dtype="bfloat16",
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


class OwnLayout(Layout):
    """Layout of methods whose authors have published none.

    Tensors have the names of the parameters. config.json has the drafter's fields in `kinds`.

    Attributes:
        method: name of the method.
        kinds: kind of each field (`models.hf.fields`), by the field's name.
    """

    def __init__(self, method: str, kinds: dict[str, tuple]):
        self.method, self.kinds = method, kinds

    def recognizes(self, raw, tensors):
        return raw.get("model_type") == self.method

    def drafter_fields(self, folder, target):
        check_sizes(folder, target)
        return {name: folder.fields.get(name, kind) for name, kind in self.kinds.items()}

    def names(self, drafter, params, stored=frozenset()):
        names = {}
        for entries, _ in jax.tree_util.tree_leaves_with_path(params):
            path = tuple(entry.key for entry in entries)
            name = ".".join(map(str, path[:-1]))
            names[path] = f"{name}.{kind_of(path)}", path[-1] == "kernel"
        return names

    def to_json(self, drafter, target_name, dtype):
        target = drafter.target
        sizes = {"hidden_size": target.d_model, "vocab_size": target.vocab_rows}
        fields = {name: getattr(drafter, name) for name in self.kinds}
        return sizes | {"model_type": self.method} | fields | {"torch_dtype": dtype}


def kind_of(path: tuple) -> str:
    """Returns the last part of a tensor's name."""
    return "bias" if path[-1] == "bias" else "weight"
