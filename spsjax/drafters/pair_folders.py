"""Folders of EAGLE drafters, in the authors' layout and in the layout of `speculators`.

EAGLE-1 has the layout of its authors (SafeAILab). EAGLE-3 is read in either layout, and written in
the layout of `speculators`, which vLLM serves.
"""

import dataclasses
from collections.abc import Callable, Set
from typing import Any, TypeVar

import numpy as np

from spsjax.drafters.folders import Folder, Layout, kind_of
from spsjax.drafters.pairs import LayerDrafter
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import config_json, families, weights
from spsjax.models.hf.fields import COUNT, OBJECT, TEXT
from spsjax.types import PyTree

_OTHER = {
    "fc": "fc",
    "embed_norm": "{layer}input_layernorm",
    "feature_norm": "{layer}hidden_norm",
    "norm": "norm",
    "head": "lm_head",
    "tap_norms": "fc_norm",
}
# Copies of the target's tensors, and tables that follow from `d2t`.
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_IGNORED = (_EMBEDDING, "t2d", "verifier_norm.weight", "verifier_lm_head.weight", "d2t")
IDS = "ids"  # the parameter that `d2t` holds


def holds_layer(raw: dict, tensors: Callable[[], Set[str]]) -> bool:
    """Returns whether a folder holds a layer over features and tokens (EAGLE-1 or EAGLE-3)."""
    named = "speculators_model_type" in raw or "draft_vocab_size" in raw
    return named or "fc.weight" in tensors()


def is_eagle3(raw: dict, tensors: Callable[[], Set[str]]) -> bool:
    """Returns whether a folder holds EAGLE-3.

    Its layer normalises its two inputs, while the layer of EAGLE-1 has no input norm.
    """
    return (
        raw.get("speculators_model_type") == "eagle3"
        or "Eagle3" in str(raw.get("architectures"))
        or raw.get("draft_vocab_size") is not None
        or "d2t" in tensors()
        or f"{prefix(tensors())}hidden_norm.weight" in tensors()
    )


def prefix(stored: Set[str]) -> str:
    """Returns the prefix of the layer's tensor names. Published drafters have one or the other."""
    midlayer = any(name.startswith("midlayer.") for name in stored)
    return "midlayer." if midlayer else "layers.0."


D = TypeVar("D", bound=LayerDrafter)


class PairLayout(Layout[D]):
    """Layout of a drafter with a layer over features and tokens."""

    optional = frozenset({"fc.bias"})  # some EAGLE-1 drafters have none

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        fields, path = folder.fields, folder.path / "config.json"
        kind = fields.get("speculators_model_type", TEXT, None)
        if kind not in (None, "eagle3"):
            raise fields.error("speculators_model_type", '"eagle3"', kind)
        nested = kind == "eagle3"
        layer = fields.get("transformer_layer_config", OBJECT) if nested else folder.raw
        config = config_json.parse(path, {"tie_word_embeddings": False} | layer)
        width = fields.get("target_hidden_size", COUNT, None) or config.d_model
        size = fields.get("target_vocab_size", COUNT, None) or config.vocab_size
        for field, stated in (("d_model", width), ("vocab_size", size)):
            wanted = target.vocab_rows if field == "vocab_size" else target.d_model
            if stated not in (wanted, getattr(target, field)):
                raise InputError(
                    f"{path}: expected a drafter for a target with {field}={wanted}, found {stated}"
                )
        config = dataclasses.replace(config, num_layers=1, vocab_size=target.vocab_size, eos_ids=())
        return {"config": config}

    def name(self, drafter: D, path: tuple, stored: Set[str]) -> str:
        layer = prefix(stored)
        if path[0] == "layer":
            config = dataclasses.replace(drafter.config, vocab_size=drafter.target.vocab_rows)
            family = config_json.family_of(config)
            location = families.locate(family, config, ("layers", 0, *path[1:]))
            return layer + location.names[0].removeprefix("model.layers.0.")
        index = f".{path[1]}" if path[0] == "tap_norms" else ""
        return f"{_OTHER[path[0]].format(layer=layer)}{index}.{kind_of(path)}"

    def layer_json(self, drafter: D, dtype: str) -> dict:
        """Returns the part of a config.json that describes the layer."""
        config = dataclasses.replace(drafter.config, vocab_size=drafter.target.vocab_rows)
        return config_json.to_json(config, dtype)

    def is_copy(self, name: str, drafter: D) -> bool:
        return name in _IGNORED

    def constants(self, folder: Folder, drafter: D) -> dict[str, np.ndarray]:
        return {name: np.sort(_ids(folder, drafter)) for name in drafter.constants}

    def tensor(
        self, folder: Folder, drafter: D, file: Any, name: str, shape: tuple[int, ...]
    ) -> np.ndarray:
        if name != _HEAD:
            return super().tensor(folder, drafter, file, name, shape)
        # The head may also have rows for the padding of the target's vocabulary.
        padded = drafter.target.vocab_rows, *shape[1:]
        whole = "d2t" not in folder.stored and tuple(file.get_slice(name).get_shape()) == padded
        rows = super().tensor(folder, drafter, file, name, padded if whole else shape)
        return rows[: shape[0]][np.argsort(_ids(folder, drafter))]

    def difference(self, folder: Folder, target_params: PyTree) -> str | None:
        embedding = target_params["embed"]["embedding"]
        path = folder.stored.get(_EMBEDDING)
        if path is None or not getattr(embedding, "is_fully_addressable", False):
            return None
        stored = weights.open_all([path])[path].get_slice(_EMBEDDING)
        differs = stored.get_shape()[1:] != [embedding.shape[1]]
        if not differs:  # compares 64 rows, because whole embeddings take too long to read
            size = min(len(embedding), stored.get_shape()[0])
            rows = np.arange(0, size, max(size // 64, 1))
            stored_rows = np.concatenate([stored[row : row + 1] for row in rows.tolist()])
            target_rows = np.asarray(embedding[rows]).astype(np.float32)
            distance = np.abs(stored_rows.astype(np.float32) - target_rows).mean()
            differs = distance > 0.05 * np.abs(target_rows).mean()
        return "embed_tokens" if differs else None


def _ids(folder: Folder, drafter: Any) -> np.ndarray:
    """Returns the target's ids of the head's rows; the tensor has their differences to 0, 1, ..."""
    count, vocab_size = np.arange(drafter.vocab_size), drafter.target.vocab_size
    if "d2t" not in folder.stored:
        return count
    path = folder.stored["d2t"]
    offsets = weights.open_all([path])[path].get_slice("d2t")
    if offsets.get_shape() != [len(count)]:
        raise InputError(f"{path}: d2t: expected shape {[len(count)]}, found {offsets.get_shape()}")
    if offsets.get_dtype() not in ("I64", "I32"):
        raise InputError(f"{path}: d2t: expected integers, found {offsets.get_dtype()}")
    ids = count + offsets[...].astype(np.int64)
    problem = f"ids from {ids.min()} to {ids.max()}"
    if len(np.unique(ids)) < len(ids):
        problem += ", some of them twice"
    elif ids.min() >= 0 and ids.max() < vocab_size:
        return ids
    raise InputError(
        f"{path}: d2t: expected offsets of different ids in [0, {vocab_size}), found {problem}"
    )
