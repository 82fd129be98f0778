"""Replacement of tensors in a model folder, which is whole at every moment."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors.numpy

from spsjax.models.hf import weights
from spsjax.models.hf.fields import read_json
from spsjax.utils import atomic_files


def replace(folder: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Replaces tensors of a model folder, or adds them to it; the other tensors stay.

    A single file is replaced. Of shards, those with an old tensor are written again under other
    names, without it, and the new tensors are a shard of their own. Then the index is replaced, and
    the old shards are removed. No file is changed in place, so that hard links to it stay as they
    are.

    Args:
        folder: folder of a model.
        tensors: new tensors by name.

    Raises:
        InputError: a file of the folder is missing or damaged.
        OSError: a file cannot be written.
    """
    if (single := folder / weights.SINGLE).exists():
        kept, metadata = _other_tensors(single, tensors)
        _write(single, kept | dict(tensors), metadata)
        return
    index = folder / weights.INDEX
    raw, shard_of = read_json(index), weights.read_index(index)
    old = sorted({shard_of[name] for name in tensors.keys() & shard_of.keys()})
    for file in old:
        kept, metadata = _other_tensors(folder / file, tensors)
        if kept:
            new = _unused(folder, file)
            _write(folder / new, kept, metadata)
            shard_of |= {name: new for name, shard in shard_of.items() if shard == file}
    new = _unused(folder, "model-mtp.safetensors")
    _write(folder / new, tensors, {"format": "pt"})
    shard_of |= dict.fromkeys(tensors, new)
    raw["weight_map"] = dict(sorted(shard_of.items()))
    raw.pop("metadata", None)  # its total size is another one now
    atomic_files.write(index, json.dumps(raw, indent=2) + "\n")
    for file in old:
        (folder / file).unlink()


def _other_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> tuple[dict, dict]:
    """Returns the tensors of a file that are not replaced, and its metadata."""
    file = weights.open_all([path])[path]
    names = sorted(set(file.keys()) - tensors.keys())
    return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


def _write(path: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: dict) -> None:
    with atomic_files.atomic_write(path) as partial:
        safetensors.numpy.save_file(dict(tensors), partial, metadata=metadata)


def _unused(folder: pathlib.Path, file: str) -> str:
    """Returns a name like that of a file which no file of the folder has."""
    stem, count = file.removesuffix(".safetensors"), 1
    while (folder / f"{stem}.{count}.safetensors").exists():
        count += 1
    return f"{stem}.{count}.safetensors"
