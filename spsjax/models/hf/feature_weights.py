"""Folders of drafters that continue a target's features: EAGLE's own layout and `speculators`'.

Both have a config.json and a model.safetensors. EAGLE-1 has the layout of the authors (SafeAILab),
EAGLE-3 is read in either layout and written in that of `speculators`, which vLLM serves.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import config_json, eagle3_config, families, weights
from spsjax.models.hf.fields import COUNT, OBJECT, TEXT, Fields, read_json
from spsjax.types import Array, PyTree
from spsjax.utils import atomic_files

_OTHER = {
    "fc": "fc",
    "embed_norm": "{layer}input_layernorm",
    "feature_norm": "{layer}hidden_norm",
    "norm": "norm",
    "head": "lm_head",
    "tap_norms": "fc_norm",
}
# Copies of what the target has, and tables that follow from `d2t`.
_EMBEDDING = "embed_tokens.weight"
_IGNORED = (_EMBEDDING, "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Content of a drafter's folder.

    Attributes:
        folder: the folder.
        method: name of the method's module: "eagle", "eagle3", or one of `head_weights`.
        fields: fields of its `Drafter`.
        layer: beginning of the layer's tensor names.
        stored: file of each tensor, by its name.
    """

    folder: pathlib.Path
    method: str
    fields: dict[str, object]
    layer: str
    stored: dict[str, pathlib.Path]


def is_drafter(folder: pathlib.Path) -> bool:
    """Returns whether a folder holds such a drafter, by its config and the names of its tensors."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    raw = read_json(path)
    if "speculators_model_type" in raw or "draft_vocab_size" in raw:
        return True
    try:
        return "fc.weight" in weights.shards(folder)
    except InputError:
        return False


def describe(folder: pathlib.Path, target: Config) -> Layout:
    """Returns what a drafter's folder holds; raises InputError if it does not fit the target."""
    path = folder / "config.json"
    raw = read_json(path)
    fields, stored = Fields(path, raw), weights.shards(folder)
    kind = fields.get("speculators_model_type", TEXT, None)
    if kind not in (None, "eagle3"):
        raise fields.error("speculators_model_type", '"eagle3"', kind)
    nested = kind == "eagle3"
    layer = fields.get("transformer_layer_config", OBJECT) if nested else raw
    # Both names have been written for the one layer.
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in stored) else "layers.0."
    config = config_json.parse(path, {"tie_word_embeddings": False} | layer)
    width = fields.get("target_hidden_size", COUNT, None) or config.d_model
    size = fields.get("target_vocab_size", COUNT, None) or config.vocab_size
    for field, found in (("d_model", width), ("vocab_size", size)):
        wanted = target.vocab_rows if field == "vocab_size" else target.d_model
        if found not in (wanted, getattr(target, field)):
            raise InputError(
                f"{path}: expected a drafter for a target with {field}={wanted}, found {found}"
            )
    config = dataclasses.replace(config, num_layers=1, vocab_size=target.vocab_size, eos_ids=())
    found = {"config": config}
    if not _is_eagle3(raw, stored, prefix):
        return Layout(folder, "eagle", found, prefix, stored)
    shapes = _shapes(
        stored, "fc.weight", "lm_head.weight", "d2t", f"{prefix}self_attn.q_proj.weight"
    )
    fc, head, ids, query = shapes
    if query and config.d_model != width and query[1:] != [config.d_model + width]:
        raise InputError(
            f"{path}: heads of another width ({config.d_model}) than the target's ({width}) are "
            f"supported if their layer reads {config.d_model + width} numbers, found {query[1:]}"
        )
    size = fields.get("draft_vocab_size", COUNT, None)
    rows = (head or ids or [size or target.vocab_size])[0]
    whole = target.vocab_size, target.vocab_rows
    if not ids and rows not in whole:
        raise InputError(f"{folder}: expected a tensor d2t, the draft's vocabulary, found none")
    if ids and not head:
        raise InputError(f"{folder}: expected a tensor lm_head.weight beside d2t, found none")
    if size not in (None, rows) and not (size in whole and rows in whole):
        raise fields.error("draft_vocab_size", f"{rows}, the rows of the head", size)
    taps = fc[1] // width if len(fc or ()) == 2 and fc[1] % width == 0 else None
    found |= eagle3_config.read(path, raw, target.num_layers, taps)
    found |= {"vocab_size": rows if ids else target.vocab_size, "own_head": bool(head)}
    return Layout(folder, "eagle3", found, prefix, stored)


def _is_eagle3(raw: dict, stored: dict[str, pathlib.Path], prefix: str) -> bool:
    """Returns whether a folder holds EAGLE-3, whose layer normalises two inputs; EAGLE-1's none."""
    return (
        raw.get("speculators_model_type") == "eagle3"
        or "d2t" in stored
        or f"{prefix}hidden_norm.weight" in stored
        or "Eagle3" in str(raw.get("architectures"))
        or raw.get("draft_vocab_size") is not None
    )


def _shapes(stored: dict[str, pathlib.Path], *names: str) -> list[list[int] | None]:
    """Returns the shapes of tensors; None: there is no such tensor."""
    files = weights.open_all({stored[name] for name in names if name in stored})
    return [
        files[stored[name]].get_slice(name).get_shape() if name in stored else None
        for name in names
    ]


def read(
    layout: Layout,
    shapes: PyTree,
    target: Config,
    sharding_of: Callable[[tuple], jax.sharding.Sharding],
) -> PyTree:
    """Reads a drafter's parameters.

    Args:
        layout: what `describe` returned.
        shapes: shapes and types of the parameters.
        target: shape of the target.
        sharding_of: sharding of each parameter.

    Raises:
        InputError: files or tensors are missing, damaged or of another drafter.
    """
    names = _names(layout.layer, shapes, layout.fields["config"])
    missing_bias = {"fc.bias"} - set(layout.stored)  # some EAGLE-1 drafters have none
    expected = {name for name, _ in names.values()} - missing_bias
    _check(layout, expected)
    files = weights.open_all(set(layout.stored.values()))
    ids = _ids(layout, files, shapes["ids"].shape, target) if "ids" in shapes else None

    def stored(name, shape):
        file = files[layout.stored[name]]
        if name == "lm_head.weight" and "d2t" not in layout.stored:
            # It may have rows for the padding of the target's vocabulary, too.
            padded = target.vocab_rows, *shape[1:]
            if tuple(file.get_slice(name).get_shape()) == padded:
                return weights.checked(file, layout.stored[name], name, padded)[: shape[0]]
        return weights.checked(file, layout.stored[name], name, shape)[...]

    def leaf(path, shape):
        path = tuple(entry.key for entry in path)
        if path == ("ids",):
            return jax.device_put(np.sort(ids).astype(np.int32), sharding_of(path))
        name, transposed = names[path]
        if name in missing_bias:
            return jax.device_put(jnp.zeros(shape.shape, shape.dtype), sharding_of(path))
        array = stored(name, shape.shape[::-1] if transposed else shape.shape)
        if path[0] == "head":
            array = array[np.argsort(ids)]
        array = (array.T if transposed else array).astype(shape.dtype)
        return jax.device_put(array, sharding_of(path))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def reads_other_embedding(layout: Layout, embedding: Array) -> bool:
    """Returns whether a folder's `embed_tokens` is not the target's [V, D], by some of its rows."""
    path = layout.stored.get(_EMBEDDING)
    if path is None:
        return False
    stored = weights.open_all([path])[path].get_slice(_EMBEDDING)
    if stored.get_shape()[1:] != [embedding.shape[1]]:
        return True
    size = min(len(embedding), stored.get_shape()[0])
    rows = np.arange(0, size, max(size // 64, 1))
    own = np.concatenate([stored[row : row + 1] for row in rows.tolist()]).astype(np.float32)
    others = np.asarray(embedding[rows]).astype(np.float32)
    return np.abs(own - others).mean() > 0.05 * np.abs(others).mean()


def _check(layout: Layout, expected: Iterable[str]) -> None:
    """Raises InputError if a tensor is missing, or if one would silently be left out."""
    for name in sorted(set(expected) - set(layout.stored)):
        raise InputError(f"{layout.folder}: expected a tensor {name}, found none")
    for name in sorted(set(layout.stored) - {*expected, *_IGNORED, "d2t"}):
        raise InputError(f"{layout.folder}: expected no tensor {name} (config.json), found one")


def _ids(layout: Layout, files, shape: tuple[int, ...], target: Config) -> np.ndarray:
    """Returns the target's ids of the head's rows; the file has the differences to 0, 1, ..."""
    count = np.arange(shape[0])
    if "d2t" not in layout.stored:
        return count
    path = layout.stored["d2t"]
    offsets = files[path].get_slice("d2t")
    if offsets.get_shape() != [len(count)]:
        raise InputError(f"{path}: d2t: expected shape {[len(count)]}, found {offsets.get_shape()}")
    if offsets.get_dtype() not in ("I64", "I32"):
        raise InputError(f"{path}: d2t: expected integers, found {offsets.get_dtype()}")
    ids = count + offsets[...].astype(np.int64)
    found = f"ids from {ids.min()} to {ids.max()}"
    if len(np.unique(ids)) < len(ids):
        found += ", some of them twice"
    elif ids.min() >= 0 and ids.max() < target.vocab_size:
        return ids
    raise InputError(
        f"{path}: d2t: expected offsets of different ids in [0, {target.vocab_size}), found {found}"
    )


def _names(layer: str, shapes: PyTree, config: Config) -> dict[tuple, tuple[str, bool]]:
    """Returns tensor name, and whether it is stored transposed, by the parameter's path."""
    family, names = config_json.family_of(config), {}
    for path, _ in jax.tree_util.tree_leaves_with_path(shapes):
        path = tuple(entry.key for entry in path)
        if path == ("ids",):
            continue
        kernel = path[-1] == "kernel"
        if path[0] == "layer":
            location = families.locate(family, config, ("layers", 0, *path[1:]))
            name = layer + location.names[0].removeprefix("model.layers.0.")
        else:
            owner = _OTHER[path[0]].format(layer=layer)
            index = f".{path[1]}" if path[0] == "tap_norms" else ""
            name = f"{owner}{index}.{'bias' if path[-1] == 'bias' else 'weight'}"
        names[path] = name, kernel
    return names


def save(
    folder: pathlib.Path,
    method: str,
    fields: dict[str, object],
    params: PyTree,
    target: Config,
    target_name: str,
    num_speculative_tokens: int,
    dtype="bfloat16",
) -> None:
    """Writes `config.json` and `model.safetensors`, each of them atomically.

    Args:
        folder: folder to write to.
        method, fields: as in `Layout`.
        params: parameters on the host.
        target: shape of the target.
        target_name: name of the target, for readers of the folder.
        num_speculative_tokens: K that the drafter is meant for.
        dtype: type of the stored weights.
    """
    config = dataclasses.replace(fields["config"], vocab_size=target.vocab_rows)
    layer = config_json.to_json(config, jnp.dtype(dtype).name)
    raw = layer | {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
    tensors = tensors_of(params, _names("layers.0.", params, config), dtype)
    if method == "eagle3":
        if fields["own_head"]:
            ids = np.asarray(params["ids"])
            tensors["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
            tensors["t2d"] = np.isin(np.arange(target.vocab_rows), ids)
        raw = _speculators(fields, layer, target, target_name, num_speculative_tokens)
    write(folder, raw, tensors)


def tensors_of(
    params: PyTree, names: dict[tuple, tuple[str, bool]], dtype
) -> dict[str, np.ndarray]:
    """Returns the tensors of a folder, from the names and whether they are stored transposed."""
    tensors = {}
    for path, (name, transposed) in names.items():
        array = params
        for entry in path:
            array = array[entry]
        array = np.asarray(array).astype(dtype)
        tensors[name] = np.ascontiguousarray(array.T if transposed else array)
    return tensors


def write(folder: pathlib.Path, raw: dict, tensors: dict, file: str = weights.SINGLE) -> None:
    """Writes a folder's config.json and tensors, each of them atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.write(folder / "config.json", json.dumps(raw, indent=2) + "\n")
    with atomic_files.atomic_write(folder / file) as partial:
        safetensors.numpy.save_file(tensors, partial, metadata={"format": "pt"})


def _speculators(
    fields, layer: dict, target: Config, target_name: str, num_speculative_tokens: int
) -> dict:
    """Returns the config.json of an EAGLE-3 drafter in the layout of `speculators`."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": fields["vocab_size"],
        "target_hidden_size": target.d_model,
        "eagle_aux_hidden_state_layer_ids": list(fields["tap_layers"]),
        **{flag: fields[flag] for flag in eagle3_config.FLAGS},
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": layer["architectures"]},
        },
    }
