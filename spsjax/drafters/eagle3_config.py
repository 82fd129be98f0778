"""Keys of the config.json of published EAGLE-3 drafters.

Trainers write them in several places: at the top level (SafeAILab, `speculators`), in
`eagle_config` (SpecForge, ModelOpt) or beside the layer's sizes in `transformer_layer_config`.
"""

import json
import pathlib
import warnings
from collections.abc import Callable

from spsjax.errors import InputError, short_repr
from spsjax.models.hf.fields import COUNT, FLAG, LIST, OBJECT, Fields

_TAPS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
FLAGS = "norm_before_residual", "fc_norm", "norm_output"
# Keys of which only one value is supported: others ask for another computation.
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
        raw: its content.
        num_layers: number of the target's layers.
        num_taps: number of the layers that the stored weights read; None: unknown.

    Raises:
        InputError: a key has a value that is not supported, or two places contradict each other.
    """
    value = _reader(path, raw)
    for key, (kind, supported) in _ONLY.items():
        where, found = value((key,), kind)
        if found not in (None, supported):
            raise InputError(
                f"{path}: {where}: expected {json.dumps(supported)}, found {short_repr(found)}"
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


def _taps(path, where, ids, num_layers, speculators: bool) -> tuple:
    """Returns the layers whose inputs are read.

    `speculators` counts inputs. In other files a list that begins with 1 counts outputs, from 0:
    the output of layer i is the input of layer i + 1.
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
    """Returns a function from names of a key to where it is and to its value; None: nowhere."""
    whole = Fields(path, raw)
    layer = whole.get(_LAYER, OBJECT, {})
    places = [whole, Fields(path, layer, _LAYER)]
    known = {*_TAPS, *FLAGS, *_ONLY, *_IMPLIED}
    for place in tuple(places):
        name = f"{place.prefix}{_NESTED}"
        nested = Fields(path, place.get(_NESTED, OBJECT, {}), name)
        for key, found in nested.raw.items():
            if key not in known and found is not None:
                raise nested.error(
                    key, f"no such key, but one of {', '.join(sorted(known))}", found
                )
        places.append(nested)

    def value(names, kind):
        found = [
            (f"{place.prefix}{name}", place.get(name, kind, None))
            for place in places
            for name in names
        ]
        found = [entry for entry in found if entry[1] is not None]
        for where, other in found[1:]:
            if other != found[0][1]:
                raise InputError(
                    f"{path}: {where}: expected {short_repr(found[0][1])}, as {found[0][0]}, "
                    f"found {short_repr(other)}"
                )
        return found[0] if found else (None, None)

    return value
