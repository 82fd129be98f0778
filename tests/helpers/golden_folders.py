"""Changed copies of the golden model folders, and comparisons of models."""

import json

import jax
import numpy as np
import safetensors.numpy
from helpers.environment import ROOT

from spsjax import loading
from spsjax.models.hf import config_json

GOLDEN = ROOT / "tests" / "golden"


def equal(one, other) -> bool:
    """Returns whether two pytrees of arrays are equal, types included."""
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(leaves, others)
    )


def edit_config(folder, remove=(), **changes):
    """Changes and removes fields of a saved config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: raw[name] for name in raw if name not in remove}))


def rewrite(folder, fields=None, tensors=None):
    """Changes the config and the only file of tensors of a folder; None removes a tensor."""
    edit_config(folder, **(fields or {}))
    (path,) = folder.glob("*.safetensors")
    stored = safetensors.numpy.load_file(path) | (tensors or {})
    kept = {name: array for name, array in stored.items() if array is not None}
    safetensors.numpy.save_file(kept, path)


def copy_golden(name, folder, rename=lambda key: key, config=lambda raw: raw, **more):
    """Copies a golden folder with other tensor names, more tensors or a changed config.json."""
    folder.mkdir()
    tensors = safetensors.numpy.load_file(GOLDEN / name / "model.safetensors")
    tensors = {rename(key): tensor for key, tensor in tensors.items()} | more
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(raw)))
    return folder


def assert_same_model(folder, name):
    """Asserts that a folder loads as the golden folder of that name does."""
    one, other = loading.load(folder), loading.load(GOLDEN / name)
    assert one.config == other.config and equal(one.params, other.params)


def golden_config(name, tmp_path, **changes):
    """Returns the `Config` of a golden config.json with changes. A None removes a key."""
    raw = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return config_json.read(tmp_path)
