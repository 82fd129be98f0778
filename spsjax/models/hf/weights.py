"""Model folders in the Hugging Face layout: `config.json` and safetensors, in and out.

Which tensor is which parameter is data (`families`).
"""

import pathlib
import re
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from spsjax.errors import InputError, one_line, short_repr
from spsjax.models import transformer
from spsjax.models.hf import config_json, families
from spsjax.models.hf.config_json import OBJECT, Fields
from spsjax.parallel import sharding
from spsjax.types import PyTree
from spsjax.utils import atomic_files

read_config = config_json.read
SINGLE, INDEX, _PICKLES = "model.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*"
PICKLE = (
    "a pickle, which could run anything; to convert it: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder), of transformers"
)


def _leaves(tree: PyTree) -> Iterator[tuple[tuple, object]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(entry.key for entry in path), leaf


def _shards(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name -> the file that holds it. A single file goes before shards, as elsewhere."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single)
    if not index.exists():
        found = f"pytorch_model.bin, {PICKLE}" if list(folder.glob(_PICKLES)) else "neither"
        raise InputError(f"{folder}: expected {SINGLE} or its index, found {found}")
    return {name: folder / file for name, file in indexed(index).items()}


def indexed(index: pathlib.Path) -> dict[str, str]:
    """Tensor name -> name of the file that holds it, by an index."""
    weight_map = Fields(index, config_json.read_json(index)).get("weight_map", OBJECT)
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != pathlib.PurePath(file).name:
            raise InputError(f"{index}: {name}: expected a file name, found {short_repr(file)}")
    return weight_map


def _open(path: pathlib.Path):
    try:
        if not path.is_file():
            raise InputError(f"{path}: expected a safetensors file, found none")
        path.open("rb").close()  # the library calls all that it cannot read absent
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: expected a whole safetensors file, found {one_line(error)}"
        ) from None


def _check_names(
    folder: pathlib.Path, found: Iterable[str], expected: Iterable[str], family: families.Family
) -> None:
    """Raises InputError at a tensor that is missing, or that would silently be left out."""
    found, expected = set(found), set(expected)
    for name in sorted(expected - found):
        raise InputError(f"{folder}: expected a tensor {name}, found none")
    for name in sorted(found - expected):
        # A tied head is sometimes stored.
        if name != "lm_head.weight" and not re.fullmatch(family.ignored, name):
            raise InputError(f"{folder}: expected no tensor {name} (config.json), found one")


def _check_same(folder: pathlib.Path, head, embedding, rows: int = 4096) -> None:
    """Raises InputError where a head that is tied to the embedding is stored, and another one."""
    count = head.get_shape()[0]
    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        if not np.array_equal(head[part], embedding[part]):
            raise InputError(
                f"{folder}: lm_head.weight: expected the embedding (tie_word_embeddings, "
                "config.json), found another tensor"
            )


def read_params(
    folder: pathlib.Path,
    config: transformer.Config,
    dtype,
    where: Callable[[tuple], jax.sharding.Sharding] | None = None,
) -> PyTree:
    """Parameters in compute type `dtype`; each device's slice alone is read for it.

    Args:
        folder: the model folder.
        config: as `read_config` gives it.
        dtype: type of the parameters in memory.
        where: as `sharding.param_shardings` gives it; None: the default device.
    """
    where = where or sharding.param_shardings(None, config)
    family = config_json.family_of(config)
    shards = _shards(folder)
    spelt: dict[str, str] = {}
    for name in shards:
        other = spelt.setdefault(families.FAMILIES[family].canonical(name), name)
        if other != name:
            raise InputError(f"{folder}: expected a tensor once, found {other} and {name}")
    if config.num_layers * max(config.num_experts, 1) > len(shards):
        experts = f" of {config.num_experts} experts" if config.num_experts else ""
        raise InputError(
            f"{folder}: expected tensors of {config.num_layers} layers{experts} (config.json), "
            f"found {len(shards)} tensors in all"
        )
    shapes = transformer.param_shapes(config, dtype)
    places = {path: families.place(family, config, path) for path, _ in _leaves(shapes)}
    _check_names(
        folder,
        spelt,
        (name for place in places.values() for name in place.names),
        families.FAMILIES[family],
    )
    files = {path: _open(path) for path in set(shards.values())}
    names = {path: set(file.keys()) for path, file in files.items()}

    def opened(name: str, shape: tuple[int, ...]):
        """The tensor of that name, which must be of that shape."""
        name = spelt[name]
        shard = shards[name]
        if name not in names[shard]:
            raise InputError(f"{shard}: expected a tensor {name}, found none")
        stored = files[shard].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise InputError(
                f"{shard}: {name}: expected shape {list(shape)}, found {stored.get_shape()}"
            )
        if stored.get_dtype() not in ("BF16", "F16", "F32", "F64"):
            raise InputError(
                f"{shard}: {name}: expected floating-point weights of 16 bits or more, "
                f"found {stored.get_dtype()}"
            )
        return stored

    if config.tie_embeddings and "lm_head.weight" in spelt:
        embedding = places["embed", "embedding"].names[0]
        rows = (config.vocab_rows, config.d_model)
        _check_same(folder, *(opened(name, rows) for name in ("lm_head.weight", embedding)))

    def read(path, shape):
        path = tuple(entry.key for entry in path)
        place, (part, count) = places[path], places[path].part
        inner = shape.shape[1:] if place.stacked else shape.shape
        stored_shape = (*inner[:-1], inner[-1] * count)
        stored_shape = stored_shape[::-1] if place.transposed else stored_shape
        stored = [opened(name, stored_shape) for name in place.names]

        def cut(index):
            chosen, index = (stored[index[0]], index[1:]) if place.stacked else (stored, index)
            start, stop, _ = index[-1].indices(inner[-1])
            index = (*index[:-1], slice(start + part * inner[-1], stop + part * inner[-1]))
            index = index[::-1] if place.transposed else index
            parts = (each[index].astype(dtype) for each in chosen)
            parts = [each.T if place.transposed else each for each in parts]
            return np.stack(parts) if place.stacked else parts[0]

        return jax.make_array_from_callback(shape.shape, where(path), cut)

    return jax.tree_util.tree_map_with_path(read, shapes)


def save(folder: str | pathlib.Path, config: transformer.Config, params: PyTree, dtype="bfloat16"):
    """Writes `config.json` and `model.safetensors`, each whole or not at all."""
    folder = pathlib.Path(folder)
    family = config_json.family_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    pieces: dict[str, dict[int, np.ndarray]] = {}
    for path, leaf in _leaves(params):
        place = families.place(family, config, path)
        array = np.asarray(jnp.asarray(leaf).astype(dtype))
        for name, each in zip(place.names, array if place.stacked else [array]):
            pieces.setdefault(name, {})[place.part[0]] = each.T if place.transposed else each
    tensors = {
        name: np.ascontiguousarray(np.concatenate([parts[i] for i in sorted(parts)], axis=-1))
        for name, parts in pieces.items()
    }
    config_json.write(folder, config, jnp.dtype(dtype).name)  # first: it may refuse the shape
    with atomic_files.atomic_write(folder / "model.safetensors") as partial:
        safetensors.numpy.save_file(tensors, partial, metadata={"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)  # another model's, and goes first
