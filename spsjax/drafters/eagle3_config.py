"""Keys of the config.json of published EAGLE-3 drafters.

Training libraries write them at the top level (SafeAILab, `speculators`), in `eagle_config`
(SpecForge, ModelOpt), or in `transformer_layer_config` with the sizes of the layer.
"""

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

from spsjax.errors import InputError, short_repr
from spsjax.models.hf.fields import COUNT, FLAG, LIST, OBJECT, Fields

_TAPS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
FLAGS = "norm_before_residual", "fc_norm", "norm_output"
# Keys with one supported value. Other values mean another computation.
_ONLY = {
    "norm_before_fc": (FLAG, False),
    "use_aux_hidden_state": (FLAG, True),
    "use_aux_hidden_states": (FLAG, True),
    "use_input_layernorm_in_first_layer": (FLAG, True),
    "use_last_layernorm": (FLAG, True),
    "use_mtp_layernorm": (FLAG, False),
    "next_layer_regular": (FLAG, True),
    "parallel_drafting": (FLAG, False),
    "parallel_draft_step": (COUNT, 1),
}
# Keys that follow from others.
_IMPLIED = "num_aux_hidden_states", "fc_input_size", "parallel_draft_heads_num_layers"
_NESTED = "eagle_config"
_LAYER = "transformer_layer_config"


def read(path: pathlib.Path, raw: dict, num_layers: int, num_taps: int | None) -> dict:
    """Returns `tap_layers` and the flags of an EAGLE-3 drafter.

    Args:
        path: path of the config.json, for messages.
        raw: content of the config.json.
        num_layers: number of layers of the target.
        num_taps: number of tapped layers by the shape of the stored weights; None: unknown.

    Raises:
        InputError: a key has a value that is not supported, or contradictory values.
    """
    value = _reader(path, raw)
    for key, (kind, supported) in _ONLY.items():
        where, stated = value((key,), kind)
        if stated not in (None, supported):
            raise InputError(
                f"{path}: {where}: expected {json.dumps(supported)}, found {short_repr(stated)}"
            )
    result = {flag: value((flag,), FLAG)[1] or False for flag in FLAGS}
    where, ids = value(_TAPS, LIST)
    speculators = raw.get("speculators_model_type") is not None
    taps = _taps(path, where, ids, num_layers, speculators)
    if num_taps is not None and len(taps) != num_taps:
        raise InputError(
            f"{path}: {where or _TAPS[0]}: expected {num_taps} layers, which fc.weight reads, "
            f"found {short_repr(ids)}"
        )
    return result | {"tap_layers": taps}


def _taps(path: pathlib.Path, where: str, ids: list, num_layers: int, speculators: bool) -> tuple:
    """Returns the layers whose inputs are read.

    Files of `speculators` list inputs. In other files, a list that begins with 1 lists outputs of
    layers, counted from 0: the output of layer i is the input of layer i + 1.
    """
    if not ids:
        taps = 2, num_layers // 2, num_layers - 3
        warnings.warn(
            f"{path}: no {_TAPS[0]}, so the drafter reads the inputs of layers "
            f"{list(taps)}, as the authors' do",
            stacklevel=2,
        )
        return taps
    shift = int(ids[0] == 1 and not speculators)
    if not all(type(tap) is int and 0 <= tap + shift <= num_layers for tap in ids):
        raise InputError(
            f"{path}: {where}: expected numbers of layers in [0, {num_layers - shift}], "
            f"found {short_repr(ids)}"
        )
    taps = tuple(tap + shift for tap in ids)
    if not shift:
        return taps
    warnings.warn(
        f"{path}: {where} {ids} begins with 1, so it is taken to count outputs of layers from 0: "
        f"the drafter reads the inputs of layers {list(taps)}",
        stacklevel=2,
    )
    return taps


def _reader(path: pathlib.Path, raw: dict) -> Callable:
    """Returns a function from the names of a key to its full name and value, or to two None."""
    top_level = Fields(path, raw)
    layer = top_level.get(_LAYER, OBJECT, {})
    sections = [top_level, Fields(path, layer, _LAYER)]
    known = {*_TAPS, *FLAGS, *_ONLY, *_IMPLIED}
    for section in tuple(sections):
        name = f"{section.prefix}{_NESTED}"
        nested = Fields(path, section.get(_NESTED, OBJECT, {}), name)
        for key, stated in nested.raw.items():
            if key not in known and stated is not None:
                raise nested.error(
                    key, f"no such key, but one of {', '.join(sorted(known))}", stated
                )
        sections.append(nested)

    def value(names: tuple[str, ...], kind: tuple) -> Any:
        entries = [
            (f"{section.prefix}{name}", section.get(name, kind, None))
            for section in sections
            for name in names
        ]
        entries = [entry for entry in entries if entry[1] is not None]
        for where, other in entries[1:]:
            if other != entries[0][1]:
                raise InputError(
                    f"{path}: {where}: expected {short_repr(entries[0][1])}, as {entries[0][0]}, "
                    f"found {short_repr(other)}"
                )
        return entries[0] if entries else (None, None)

    return value
