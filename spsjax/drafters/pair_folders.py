"""Folders of EAGLE drafters, in the authors' layout and in the layout of `speculators`.

EAGLE-1 has the layout of its authors (SafeAILab). EAGLE-3 is read in either layout, and written in
the layout of `speculators`, which vLLM serves.
"""

import dataclasses
from collections.abc import Callable, Set
from typing import Any, TypeVar

from spsjax.drafters import block_folders, speculators_folders
from spsjax.drafters.folders import Folder, kind_of
from spsjax.drafters.pairs import LayerDrafter
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import config_json, families
from spsjax.models.hf.fields import COUNT, OBJECT

_OTHER = {
    "fc": "fc",
    "embed_norm": "{layer}input_layernorm",
    "feature_norm": "{layer}hidden_norm",
    "norm": "norm",
    "head": "lm_head",
    "tap_norms": "fc_norm",
}


def holds_layer(raw: dict, tensors: Callable[[], Set[str]]) -> bool:
    """Returns whether a folder holds a layer over features and tokens (EAGLE-1 or EAGLE-3).

    Block drafters have a tensor of that name, too, but say in config.json what they are.
    """
    if (kind := raw.get(speculators_folders.KEY)) is not None:
        return kind == "eagle3"
    named = "draft_vocab_size" in raw or "fc.weight" in tensors()
    return named and block_folders.method_of(raw) is None


def is_eagle3(raw: dict, tensors: Callable[[], Set[str]]) -> bool:
    """Returns whether a folder holds EAGLE-3.

    Its layer normalises its two inputs, while the layer of EAGLE-1 has no input norm.
    """
    return (
        raw.get(speculators_folders.KEY) == "eagle3"
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


class PairLayout(speculators_folders.SpeculatorsLayout[D]):
    """Layout of a drafter with a layer over features and tokens."""

    optional = frozenset({"fc.bias"})  # some EAGLE-1 drafters have none

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        fields, path = folder.fields, folder.path / "config.json"
        nested = folder.raw.get(speculators_folders.KEY) is not None
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
