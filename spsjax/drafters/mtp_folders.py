"""Heads for multi-token prediction in the target's folder, or in a folder of `speculators`.

In the folder of a target its tensors begin with `mtp.` (Qwen), or have the names of a layer after
the last one (DeepSeek, GLM). A folder of `speculators` has the head alone. Heads are written into
the folder of a target, or else in the layout of `speculators`.
"""

import dataclasses
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Set
from typing import Any

from jax.typing import DTypeLike

from spsjax.drafters import speculators_folders
from spsjax.drafters.folders import Folder
from spsjax.drafters.pairs import LayerDrafter
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import config_json, families, qwen_hybrids, stitching, weights
from spsjax.models.hf.fields import COUNT, OBJECT, Fields, read_json
from spsjax.models.hf.locations import TensorLocation
from spsjax.types import PyTree

_LAYER = "transformer_layer_config"
_FULL = "attention", "latent"  # mixers whose layers read all earlier tokens
# Names of the head's modules in each layout. `{next}` is the name of the layer after the last one.
_QWEN = {
    "fc": "mtp.fc",
    "embed_norm": "mtp.pre_fc_norm_embedding",
    "feature_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}
_DEEPSEEK = {
    "fc": "{next}.eh_proj",
    "embed_norm": "{next}.enorm",
    "feature_norm": "{next}.hnorm",
    "norm": "{next}.shared_head.norm",
    "layer": "{next}",
}
_SPECULATORS = {
    "fc": "mtp_layers.0.input_proj",
    "embed_norm": "mtp_layers.0.token_layernorm",
    "feature_norm": "mtp_layers.0.hidden_layernorm",
    "norm": "mtp_layers.0.final_layernorm",
    "layer": "mtp_layers.0",
}
# Copies of the target's tensors. Heads after the first are not used either.
_COPIES = re.compile(
    r"(.*\.)?embed_tokens\.weight|.*\.shared_head\.head\.weight|(verifier_)?lm_head\.weight"
    r"|mtp\.layers\.[1-9].*"
)


def layer_of(target: Config) -> Config:
    """Returns the shape of a head's layer: that of the target's last layer of full attention.

    Of targets with other positions, whose heads are not published, it has rotary ones.
    """
    layers = list(map(target.layer, range(target.num_layers)))
    full = [layer for layer in layers if layer.mixer in _FULL and not layer.windows]
    return dataclasses.replace((full or layers)[-1], num_layers=1, positions="rotary")


class MtpLayout(speculators_folders.SpeculatorsLayout[LayerDrafter]):
    """Layouts of heads for multi-token prediction."""

    in_target = True

    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        return raw.get(speculators_folders.KEY) == "mtp"

    def open(self, path: pathlib.Path) -> Folder:
        folder = super().open(path)
        if speculators_folders.KEY in folder.raw:
            return folder
        target = config_json.read(path)
        modules, after = _modules(target, folder.stored.keys()), _next_layer(target)
        if modules is _SPECULATORS:
            raise InputError(
                f"{path}: expected a head for multi-token prediction, as mtp.fc.weight or "
                f"{after}.eh_proj.weight, found none"
            )
        begin = "mtp." if modules is _QWEN else f"{after}."
        own = {name: file for name, file in folder.stored.items() if name.startswith(begin)}
        second = "mtp.layers.1." if modules is _QWEN else f"{_next_layer(target, 1)}.eh_proj."
        if any(name.startswith(second) for name in folder.stored):
            warnings.warn(
                f"{path}: several heads for multi-token prediction: the first one drafts all "
                "tokens, and the others are not used",
                stacklevel=2,
            )
        return Folder(path, folder.raw, own)

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        _check_sizes(folder, target)
        return {"config": layer_of(target)}

    def name(self, drafter: LayerDrafter, path: tuple, stored: Set[str]) -> str:
        return f"{_modules(drafter.target, stored)[path[0]]}.weight"

    def location(self, drafter: LayerDrafter, path: tuple, stored: Set[str]) -> TensorLocation:
        if path[0] != "layer":
            return super().location(drafter, path, stored)
        family = config_json.family_of(drafter.target)
        old = families.FAMILIES[family].layer_prefix.format(layer=0)
        new = f"{_modules(drafter.target, stored)['layer']}."
        fused = qwen_hybrids.fused_experts(drafter.config).get(".".join(path[1:]))
        if fused and new == f"{_SPECULATORS['layer']}.":  # as `transformers` has them in memory
            name = new + fused.tensor
            return TensorLocation((name,), False, True, fused.index, sizes=fused.sizes)
        known = {old + name.removeprefix(new) for name in stored if name.startswith(new)}
        layer = "layers", 0, *path[1:]
        location = families.locate(family, drafter.config, layer, known)
        names = tuple(new + name.removeprefix(old) for name in location.names)
        return dataclasses.replace(location, names=names)

    def is_copy(self, name: str, drafter: LayerDrafter) -> bool:
        return _COPIES.fullmatch(name) is not None

    def difference(self, folder: Folder, target_params: PyTree) -> str | None:
        tied = "head" not in target_params
        table = target_params["embed"]["embedding"]
        head = (table, 0) if tied else (target_params["head"]["kernel"], 1)
        for name in filter(_COPIES.fullmatch, folder.stored):
            rows = {"embed_tokens.weight": (table, 0), "head.weight": head}
            for end, (matrix, axis) in rows.items():
                if name.endswith(end) and speculators_folders.differs(folder, name, matrix, axis):
                    return name
        return None

    def write(
        self,
        path: pathlib.Path,
        drafter: LayerDrafter,
        params: PyTree,
        target_name: str,
        dtype: DTypeLike = "bfloat16",
    ) -> None:
        """Writes a head into the folder of its target if `path` is one, else into one of its own.

        A folder of a target keeps all other tensors, and is whole at every moment.
        """
        stored = _target_tensors(path, drafter.target)
        if stored is None:
            return super().write(path, drafter, params, target_name, dtype)
        folder = Folder(path, read_json(path / "config.json"), stored)
        _check_sizes(folder, drafter.target)
        names = stored.keys()
        if _modules(drafter.target, names) is _SPECULATORS:  # the target has no head yet
            family = families.FAMILIES[config_json.family_of(drafter.target)]
            module = f"{_next_layer(drafter.target)}.eh_proj" if family.predictor else _QWEN["fc"]
            names = {f"{module}.weight"}
        stitching.replace(path, self.located(drafter, params, dtype, names))

    def to_json(self, drafter: LayerDrafter, target_name: str, dtype: str) -> dict:
        layer: dict[str, Any] = config_json.to_json(drafter.target, dtype)
        about = "mtp", drafter, target_name, layer["architectures"]
        return {
            "architectures": ["MTPDraftModel"],
            speculators_folders.KEY: "mtp",
            "num_nextn_predict_layers": 1,
            _LAYER: layer,
            "speculators_config": speculators_folders.proposals(*about),
        }


def _next_layer(target: Config, further: int = 0) -> str:
    """Returns the name of the layer after the target's last one, or of a layer behind that."""
    prefix = families.FAMILIES[config_json.family_of(target)].layer_prefix
    return prefix.format(layer=target.num_layers + further).removesuffix(".")


def _modules(target: Config, stored: Set[str]) -> Mapping[str, str]:
    """Returns the names of the head's modules in the layout that the stored names have.

    One tensor of a layout suffices, so that the reader names those that are missing.
    """
    if any(name.startswith("mtp.") for name in stored):
        return _QWEN
    after = {name: text.replace("{next}", _next_layer(target)) for name, text in _DEEPSEEK.items()}
    own = {f"{module}.weight" for name, module in after.items() if name != "layer"}
    return _SPECULATORS if own.isdisjoint(stored) else after


def _target_tensors(path: pathlib.Path, target: Config) -> dict[str, pathlib.Path] | None:
    """Returns the file of each tensor of a target's folder; None: it is another folder, or none."""
    config = path / "config.json"
    if not config.is_file() or speculators_folders.KEY in read_json(config):
        return None
    family = families.FAMILIES[config_json.family_of(target)]
    stored = weights.shards(path)
    embedding = f"{family.other_names['embed']}.weight"
    return stored if embedding in map(family.canonical, stored) else None


def _check_sizes(folder: Folder, target: Config) -> None:
    """Raises InputError if the config.json states sizes of another target.

    Files of `speculators` leave out sizes that are the defaults of the target's class.
    """
    family = families.FAMILIES[config_json.family_of(target)]
    parent = _LAYER if speculators_folders.KEY in folder.raw else ""
    if not parent and family.nested_in and family.nested_in.key in folder.raw:
        parent = family.nested_in.key
    raw = folder.fields.get(parent, OBJECT, {}) if parent else folder.raw
    fields = Fields(folder.path / "config.json", raw, parent)
    for field in ("vocab_size", "d_model", "num_layers", "num_heads"):
        key, wanted = family.keys[field], getattr(target, field)
        size = fields.get(key, COUNT, None)
        padded = target.vocab_rows if field == "vocab_size" else wanted
        if size not in (None, wanted, padded):
            raise fields.error(key, f"{padded}, the target's", size)
