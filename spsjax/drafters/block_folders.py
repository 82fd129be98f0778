"""Folders of block drafters: DFlash and its kin, in the layouts of authors and of `speculators`.

The layouts have the same tensors. Those of the authors (z-lab; DeepSpec for DSpark) have the keys
of the layers at the top level, and other keys there or in `dflash_config`. That of `speculators`
has the keys of the layers in `transformer_layer_config`, copies of the target's vocabulary matrices
and, for a draft vocabulary, a head and tables. Folders are written in the layout of the authors,
unless the drafter has a vocabulary of its own, which only `speculators` has.
"""

import dataclasses
import pathlib
import types
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

from spsjax.drafters import folders
from spsjax.drafters.blocks import BlockDrafter
from spsjax.drafters.folders import Folder
from spsjax.drafters.speculators_folders import (
    HEAD,
    KEY,
    SpeculatorsLayout,
    proposals,
    vocabulary_of,
)
from spsjax.errors import InputError, short_repr
from spsjax.models.config import Config
from spsjax.models.hf import config_json, families
from spsjax.models.hf.fields import COUNT, FLAG, LIST, NUMBER, OBJECT, POSITIVE, Fields

SECTION = "dflash_config"
_LAYER = "transformer_layer_config"
_WINDOWED = "sliding_attention"
_SCALES = {
    "embed_scale": ("input_embedding_scale", 1.0),
    "output_scale": ("output_multiplier", 1.0),
    "softcap": ("final_logit_softcapping", 0.0),
}
_METHODS = "dflash", "dflash2", "dspark"  # whose drafts are blocks


def method_of(raw: dict) -> str | None:
    """Returns "dflash", "dflash2" or "dspark" for a config.json of a block drafter, else None."""
    stated = raw.get(KEY)
    if stated is not None:
        return stated if stated in _METHODS else None
    section, names = raw.get(SECTION), str(raw.get("architectures"))
    section = section if isinstance(section, dict) else {}
    if "DFlash2" in names or "selector_rank" in section:
        return "dflash2"
    if "DSpark" in names or "markov_rank" in raw or "markov_rank" in section:
        return "dspark"
    return "dflash" if "DFlash" in names or SECTION in raw else None


D = TypeVar("D", bound=BlockDrafter)


class BlockLayout(SpeculatorsLayout[D]):
    """Layout of a method.

    Attributes:
        method: name of the method.
        architectures: class of the model in files of the authors, and in files of `speculators`.
        options: further keys by the field of the drafter, each with its kind and default.
        has_section: whether the keys that do not describe the layers are written to a section.
    """

    def __init__(
        self,
        method: str,
        architectures: tuple[str, str],
        options: Mapping[str, tuple] = types.MappingProxyType({}),
        has_section: bool = True,
    ) -> None:
        self.method, self.architectures = method, architectures
        self.options, self.has_section = options, has_section

    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        return method_of(raw) == self.method

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        keys = Keys(folder.path / "config.json", folder.raw)
        config = _layers(keys, target)
        fields = {"config": config, "tap_layers": _taps(keys, target, config.num_layers)}
        fields["block_size"] = keys.get("block_size", COUNT)
        fields["mask_token_id"] = keys.get("mask_token_id", NUMBER)
        fields["anchor_drafts"] = keys.get("sample_from_anchor", FLAG, self.method == "dspark")
        fields["causal"] = self._causal(keys)
        for field, (key, default) in _SCALES.items():
            fields[field] = float(keys.get(key, POSITIVE, default))
        fields["vocab_size"], _ = vocabulary_of(folder, target)
        for field, (key, kind, default) in self.options.items():
            fields[field] = keys.get(key, kind, default)
        return fields

    def _causal(self, keys: "Keys") -> str:
        """Returns which layers are causal: by a flag for all of them, or those with a window."""
        flag = keys.get("is_causal", FLAG, keys.get("causal", FLAG, None))
        if flag is not None:
            return "all" if flag else "none"
        other = keys.is_nested and self.method == "dflash2"
        return "none" if keys.get("sliding_window_non_causal", FLAG, other) else "windows"

    def name(self, drafter: D, path: tuple, stored: Set[str]) -> str:
        if path[0] == "head":
            return HEAD
        if path[0] == "layers" and not path[2].endswith("_conv"):
            location = families.locate("qwen3", drafter.config, path)
            return location.names[0].removeprefix("model.")
        module = ".".join(map(str, path[:-1])).replace("ffn_conv", "mlp_conv")
        is_module = path[-1] in ("kernel", "embedding", "scale", "bias")
        return f"{module}.{folders.kind_of(path) if is_module else path[-1]}"

    def is_copy(self, name: str, drafter: D) -> bool:
        return name == HEAD or super().is_copy(name, drafter)

    def to_json(self, drafter: D, target_name: str, dtype: str) -> dict:
        target = drafter.target
        config = dataclasses.replace(drafter.config, vocab_size=target.vocab_rows)
        layers: dict[str, Any] = config_json.to_json(config, dtype)
        block = {
            "block_size": drafter.block_size,
            "mask_token_id": drafter.mask_token_id,
            "sample_from_anchor": drafter.anchor_drafts,
        }
        options = {key: getattr(drafter, field) for field, (key, _, _) in self.options.items()}
        scales = {key: getattr(drafter, field) or None for field, (key, _) in _SCALES.items()}
        if drafter.own_head:
            method = proposals(self.method, drafter, target_name, layers["architectures"])
            return {
                "architectures": [self.architectures[1]],
                KEY: self.method,
                "draft_vocab_size": drafter.vocab_size,
                "aux_hidden_state_layer_ids": list(drafter.tap_layers),
                "sliding_window_non_causal": drafter.causal == "none",
                **({"is_causal": True} if drafter.causal == "all" else {}),
                **block,
                **options,
                **scales,
                "transformer_layer_config": layers,
                "speculators_config": method,
            }
        section = block | {"target_layer_ids": [tap - 1 for tap in drafter.tap_layers]}
        section |= scales | options
        causal = {} if drafter.causal == "windows" else {"is_causal": drafter.causal == "all"}
        return layers | {
            "architectures": [self.architectures[0]],
            "num_target_layers": target.num_layers,
            "block_size": drafter.block_size,
            **causal,
            **({SECTION: section} if self.has_section else section),
            "base_model_name_or_path": target_name,
        }


class Keys:
    """Keys of a config.json, which are in a section of their own or at the top level."""

    def __init__(self, path: pathlib.Path, raw: dict) -> None:
        self.path, self.top = path, Fields(path, raw)
        self.section = Fields(path, self.top.get(SECTION, OBJECT, {}), SECTION)
        self.is_nested = raw.get(KEY) is not None
        layer = self.top.get(_LAYER, OBJECT) if self.is_nested else raw
        self.layer = Fields(path, layer, _LAYER if self.is_nested else "")

    def get(self, name: str, kind: tuple, *default: object) -> Any:
        """Returns the value of a key; raises InputError if both places have different values."""
        inner = self.section.get(name, kind, None)
        if inner is None:
            return self.top.get(name, kind, *default)
        outer = self.top.get(name, kind, inner)
        if outer != inner:
            raise self.error(name, f"{short_repr(inner)}, as {SECTION}.{name}", outer)
        return inner

    def error(self, name: str, expected: str, value: object) -> InputError:
        """Returns an error about the value of a key."""
        return self.top.error(name, expected, value)


def _layers(keys: Keys, target: Config) -> Config:
    """Returns the shape of the layers; raises InputError if they are of another target."""
    raw = {"model_type": "qwen3", "tie_word_embeddings": False} | keys.layer.raw
    if raw["model_type"] != "qwen3":
        raise keys.layer.error("model_type", '"qwen3", the layers of DFlash', raw["model_type"])
    kinds = keys.layer.get("layer_types", LIST, [])
    if _WINDOWED in kinds and keys.layer.get("use_sliding_window", FLAG, None) is None:
        raw["use_sliding_window"] = True  # as the layers say
    config = config_json.parse(keys.path, raw, keys.layer.parent)
    for field, stated in (("d_model", config.d_model), ("vocab_size", config.vocab_size)):
        wanted = target.vocab_rows if field == "vocab_size" else target.d_model
        if stated not in (wanted, getattr(target, field)):
            raise InputError(
                f"{keys.path}: expected a drafter for a target with {field}={wanted}, "
                f"found {stated}"
            )
    return dataclasses.replace(
        config, vocab_size=target.vocab_size, eos_ids=(), bos_id=None, logit_softcap=0.0
    )


def _taps(keys: Keys, target: Config, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs are read.

    The authors list outputs of layers, counted from 0: the output of layer i is the input of layer
    i + 1. `speculators` lists inputs.
    """
    count = keys.get("num_target_layers", COUNT, target.num_layers)
    if count != target.num_layers:
        raise keys.error("num_target_layers", f"the target's {target.num_layers}", count)
    name = "aux_hidden_state_layer_ids" if keys.is_nested else "target_layer_ids"
    ids, shift = keys.get(name, LIST), int(not keys.is_nested)
    last = target.num_layers - shift
    if not ids or not all(type(id) is int and -shift <= id <= last for id in ids):
        raise keys.error(name, f"numbers of layers in [{-shift}, {last}]", ids)
    return tuple(id + shift for id in ids)
