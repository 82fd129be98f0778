"""Folders of drafters that are no EAGLE: Medusa, MLP speculator, blockwise, Falcon, SPiRE.

Medusa has the layout of its authors (`medusa_lm_head.safetensors`, with or without vocabulary
matrices), the MLP speculator that of IBM's published accelerators. Blockwise heads, Falcon and
SPiRE have layouts of their own.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import config_json, feature_weights, weights
from spsjax.models.hf.fields import COUNT, FLAG, NUMBER, OBJECT, Fields, read_json
from spsjax.types import PyTree

MEDUSA_FILE = "medusa_lm_head.safetensors"
_OWN = "blockwise", "falcon", "spire"
_TYPES = "mlp_speculator", *_OWN
_SPIRE = "num_layers", "sinks", "recent"


def method_of(folder: pathlib.Path) -> str | None:
    """Returns the method of the drafter in a folder; None: it holds no such drafter."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    raw = read_json(path)
    if "medusa_num_heads" in raw:
        return "medusa"
    return raw["model_type"] if raw.get("model_type") in _TYPES else None


def describe(folder: pathlib.Path, target: Config) -> feature_weights.Layout:
    """Returns what a drafter's folder holds; raises InputError if it does not fit the target."""
    path, method = folder / "config.json", method_of(folder)
    fields = Fields(path, read_json(path))
    stored = _stored(folder, method)
    for name, wanted in (
        ("emb_dim", {target.d_model}),
        ("hidden_size", {target.d_model}),
        ("vocab_size", {target.vocab_size, target.vocab_rows}),
    ):
        found = fields.get(name, COUNT, None)
        if found is not None and found not in wanted:
            raise InputError(
                f"{path}: expected a drafter for a target with {name} {max(wanted)}, found {found}"
            )
    if method == "medusa":
        heads = {name.partition(".")[0] for name in stored}
        blocks = fields.get("medusa_num_layers", COUNT, 1)
        own = f"0.{blocks}.weight" in stored
        found = {"num_heads": len(heads), "num_blocks": blocks, "own_heads": own}
    elif method == "mlp_speculator":
        width = fields.get("inner_dim", NUMBER, 0) or fields.get("emb_dim", COUNT)
        found = {
            "num_steps": fields.get("n_predict", COUNT),
            "width": width,
            "tied": fields.get("tie_weights", FLAG, False),
            "scale_input": fields.get("scale_input", FLAG, False),
        }
    elif method == "falcon":
        layer = config_json.parse(path, fields.get("layer", OBJECT))
        layer = dataclasses.replace(layer, num_layers=1, vocab_size=target.vocab_size, eos_ids=())
        found = {"config": layer, "tokens_per_step": fields.get("tokens_per_step", COUNT)}
    elif method == "spire":
        found = {name: fields.get(name, NUMBER if name == "sinks" else COUNT) for name in _SPIRE}
        if found["num_layers"] > target.num_layers:
            raise InputError(
                f"{path}: expected num_layers up to the target's {target.num_layers}, found "
                f"{found['num_layers']}"
            )
    else:
        found = {"num_heads": fields.get("num_heads", COUNT), "d_ff": fields.get("d_ff", COUNT)}
    return feature_weights.Layout(folder, method, found, "", stored)


def _stored(folder: pathlib.Path, method: str) -> dict[str, pathlib.Path]:
    if method != "medusa":
        return weights.shards(folder)
    path = folder / MEDUSA_FILE
    if not path.is_file():
        raise InputError(f"{folder}: expected {MEDUSA_FILE}, found none. Convert a .pt file to it")
    return dict.fromkeys(weights.open_all([path])[path].keys(), path)


def read(
    layout: feature_weights.Layout,
    shapes: PyTree,
    target: Config,
    sharding_of: Callable[[tuple], jax.sharding.Sharding],
) -> PyTree:
    """Reads a drafter's parameters; arguments and errors as of `feature_weights.read`."""
    names = _names(layout.method, layout.fields, shapes)
    expected = {name for name, _ in names.values()}
    for name in sorted(expected - set(layout.stored)):
        raise InputError(f"{layout.folder}: expected a tensor {name}, found none")
    for name in sorted(set(layout.stored) - expected):
        if not _is_tied_copy(name, layout):
            raise InputError(f"{layout.folder}: expected no tensor {name} (config.json), found one")
    files = weights.open_all(set(layout.stored.values()))

    def leaf(path, shape):
        path = tuple(entry.key for entry in path)
        name, transposed = names[path]
        file = layout.stored[name]
        wanted = shape.shape[::-1] if transposed else shape.shape
        array = weights.checked(files[file], file, name, wanted)[...]
        array = (array.T if transposed else array).astype(shape.dtype)
        return jax.device_put(array, sharding_of(path))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def _is_tied_copy(name: str, layout: feature_weights.Layout) -> bool:
    """Whether a tensor repeats one that all steps of an MLP speculator share."""
    if layout.method != "mlp_speculator" or not layout.fields["tied"]:
        return False
    kind, _, index = name.removeprefix("speculator.").partition(".")
    index = index.partition(".")[0]
    known = index.isdecimal() and int(index) < layout.fields["num_steps"]
    return kind in ("emb", "ln", "head", "proj") and known


_MLP = {"project": "proj", "embed": "emb", "norm": "ln", "head": "head"}


def _names(method: str, fields: dict, shapes: PyTree) -> dict[tuple, tuple[str, bool]]:
    """Returns tensor name, and whether it is stored transposed, by the parameter's path."""
    names = {}
    for entries, _ in jax.tree_util.tree_leaves_with_path(shapes):
        path = tuple(entry.key for entry in entries)
        kind = "bias" if path[-1] == "bias" else "weight"
        if method in _OWN:
            name = ".".join(map(str, path[:-1]))
        elif method == "mlp_speculator":
            name = f"speculator.{_MLP[path[2]]}.{path[1]}"
        elif path[2] == "head":
            name = f"{path[1]}.{fields['num_blocks']}"
        else:
            name = f"{path[1]}.{path[3]}.linear"
        names[path] = f"{name}.{kind}", path[-1] == "kernel"
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
    """Writes a drafter's folder; arguments as of `feature_weights.save`."""
    raw = {"hidden_size": target.d_model, "vocab_size": target.vocab_rows}
    if method == "medusa":
        raw |= {
            "model_type": "medusa",
            "medusa_num_heads": fields["num_heads"],
            "medusa_num_layers": fields["num_blocks"],
            "base_model_name_or_path": target_name,
        }
    elif method == "mlp_speculator":
        raw = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": method,
            "emb_dim": target.d_model,
            "inner_dim": fields["width"],
            "n_predict": fields["num_steps"],
            "tie_weights": fields["tied"],
            "scale_input": fields["scale_input"],
            "top_k_tokens_per_head": [1] * fields["num_steps"],
            "vocab_size": target.vocab_rows,
        }
    elif method == "falcon":
        layer = config_json.to_json(fields["config"], jnp.dtype(dtype).name)
        raw |= {"model_type": method, "tokens_per_step": fields["tokens_per_step"], "layer": layer}
    elif method == "spire":
        raw |= {"model_type": method} | {name: fields[name] for name in _SPIRE}
    else:
        raw |= {"model_type": method, "num_heads": fields["num_heads"], "d_ff": fields["d_ff"]}
    raw["torch_dtype"] = jnp.dtype(dtype).name
    tensors = feature_weights.tensors_of(params, _names(method, fields, params), dtype)
    file = MEDUSA_FILE if method == "medusa" else weights.SINGLE
    feature_weights.write(folder, raw, tensors, file)
