"""`config.json`, as Hugging Face's tools write it: into a `Config`, and back."""

import dataclasses
import json
import os
import pathlib

from spsjax.errors import InputError, one_line, short_repr
from spsjax.models.config import Config
from spsjax.models.hf.families import FAMILIES, FEATURES, Family
from spsjax.utils import atomic_files

# What a field must be, in words and as a predicate; a bool is no int here.
NUMBER = "an integer in [0, 2**31)", lambda x: type(x) is int and 0 <= x < 2**31
COUNT = "an integer in [1, 2**31)", lambda x: type(x) is int and 1 <= x < 2**31
POSITIVE = "a positive number", lambda x: type(x) in (int, float) and 0 < x < 1e30
TOKEN = "a token id", NUMBER[1]
TOKENS = (
    "one or more token ids",
    lambda x: all(map(NUMBER[1], x if type(x) is list else [x])),
)
FLAG = "true or false", lambda x: type(x) is bool
TEXT = "a text", lambda x: type(x) is str
LIST = "a list", lambda x: type(x) is list
OBJECT = "an object", lambda x: type(x) is dict
_KINDS = {"norm_eps": POSITIVE, "renormalize": FLAG}
# Keys of which a null does not mean that they are absent.
_NULL = "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"
_SOFTCAPS = {
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_BOUNDS = "bos_token_id", "eos_token_id"
_EXPERTS = "num_experts", "num_local_experts"
_LOCAL, _FULL = "sliding_attention", "full_attention"
# Flags that tell families from each other; others, such as windows, members have or have not.
_TELLING = "positions", "ffn", "norm", "norm_offset", "post_norms", "qk_norm", "biases"


def read_json(path: pathlib.Path) -> dict:
    """The object in a file; raises InputError where there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, found {one_line(error)}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


class Fields:
    """The fields of one JSON object, checked as they are read. A null is an absent field.

    `inside` says of which field of the file the object is the value, if it is not the whole file.
    """

    def __init__(self, path: pathlib.Path, raw: dict, inside: str = ""):
        self.path, self.raw, self.inside = path, raw, f"{inside}." * bool(inside)

    def get(self, name: str, kind, *default):
        """The value of a field, which must be of that kind; `default` if there is none."""
        value, (expected, is_valid) = self.raw.get(name), kind
        if value is None:
            if not default:
                raise InputError(
                    f"{self.path}: {self.inside}{name}: expected {expected}, found none"
                )
            return default[0]
        if not is_valid(value):
            raise self.error(name, expected, value)
        return value

    def only(self, name: str, kind, supported) -> None:
        """Refuses every value but the one supported, which is also the default."""
        found = self.get(name, kind, supported)
        if found != supported:
            raise self.error(name, json.dumps(supported), found)

    def error(self, name: str, expected: str, found) -> InputError:
        return InputError(
            f"{self.path}: {self.inside}{name}: expected {expected}, found {short_repr(found)}"
        )


def read(folder: pathlib.Path) -> Config:
    """The shape of the model in `folder`; raises InputError where it is of no known family."""
    path = folder / "config.json"
    if os.access(folder, os.X_OK) and not path.exists():
        raise InputError(f"{folder}: expected a model folder with config.json, found none")
    config = _parse(path, read_json(path))
    more = folder / "generation_config.json"
    if more.exists():  # of a model that was tuned to talk, it knows more ends
        ends = _tokens(Fields(more, read_json(more)), config.vocab_size)["eos_ids"]
        config = dataclasses.replace(config, eos_ids=ends or config.eos_ids)
    return config


def _parse(path: pathlib.Path, raw: dict) -> Config:
    name, fields = _family(Fields(path, raw))
    family = FAMILIES[name]
    _check_plain(fields, family)
    found = _sizes(fields, family)
    found |= _rope(fields)
    found["windows"] = _windows(fields, found["num_layers"], family.period)
    for field, key in _SOFTCAPS.items():
        found[field] = float(fields.get(key, POSITIVE, 0.0))
    scalar = fields.get("query_pre_attn_scalar", POSITIVE, found["head_dim"])
    found["query_scale"] = 0.0 if scalar == found["head_dim"] else float(scalar) ** -0.5
    found["tie_embeddings"] = fields.get("tie_word_embeddings", FLAG, False)
    found |= _tokens(fields, found["vocab_size"])
    try:
        return Config(**family.flags | found)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def _family(fields: Fields) -> tuple[str, Fields]:
    """Which family it is, and its fields, with what it means where it leaves one out."""
    name = fields.get("model_type", TEXT)
    if fields.raw.get("quantization_config") is not None:
        raise InputError(f"{fields.path}: quantization_config: expected none, found one")
    outer = {family.inside[0]: inner for inner, family in FAMILIES.items() if family.inside}
    if name in outer:
        name = outer[name]
        key = FAMILIES[name].inside[1]
        # Begin and ends are the whole model's: what is inside may know fewer of them.
        whole = {name: fields.raw[name] for name in _BOUNDS if fields.raw.get(name) is not None}
        fields = Fields(fields.path, fields.raw | fields.get(key, OBJECT) | whole, key)
    elif name not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *outer]))
        raise fields.error("model_type", f"one of {known}", name)
    absent = FAMILIES[name].absent
    given = {
        key: value
        for key, value in fields.raw.items()
        if (value is not None or key in _NULL) and (key in absent or key not in FEATURES)
    }
    fields.raw = absent | given
    return name, fields


def _check_plain(fields: Fields, family: Family) -> None:
    """Raises InputError where a flag asks for what the decoder does not have."""
    key, *names = family.activation
    found = fields.get(key, TEXT, names[0])
    if found not in names:
        raise fields.error(key, " or ".join(map(json.dumps, names)), found)
    for key in ("attention_bias", "mlp_bias", "add_cross_attention", "use_bidirectional_attention"):
        fields.only(key, FLAG, False)
    fields.only("scale_attn_by_inverse_layer_idx", FLAG, False)
    fields.only("scale_attn_weights", FLAG, True)
    fields.only("decoder_sparse_step", NUMBER, 1)
    fields.only("mlp_only_layers", LIST, [])


def _sizes(fields: Fields, family: Family) -> dict[str, object]:
    found = {}
    for field, key in family.keys.items():
        if field == "num_experts" and fields.raw.get(key) is None:
            key = next(name for name in _EXPERTS if name != key)  # files have either
        value = fields.get(key, _KINDS.get(field, COUNT), None)
        if value is not None:
            found[field] = float(value) if field == "norm_eps" else value
    if family.widening and "d_model" in found:
        found.setdefault("d_ff", family.widening * found["d_model"])
    for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "max_positions"):
        if field not in found:
            fields.get(family.keys[field], COUNT)  # there is none
    heads, d_model = found["num_heads"], found["d_model"]
    found.setdefault("num_kv_heads", heads)
    if "head_dim" not in found:
        if d_model % heads:
            key = family.keys["d_model"]
            raise fields.error(key, f"a multiple of {family.keys['num_heads']}={heads}", d_model)
        found["head_dim"] = d_model // heads
    return found


def _rope(fields: Fields) -> dict[str, object]:
    """Base and scaling of the rotary frequencies.

    Older versions write `rope_theta`, `rope_scaling` and, of layers with a window,
    `rope_local_base_freq`; newer ones write all of it into `rope_parameters`. Where both are there,
    `rope_scaling` goes first.
    """
    theta = fields.get("rope_theta", POSITIVE, 10_000.0)
    local = fields.get("rope_local_base_freq", POSITIVE, 0.0)
    parameters = fields.get("rope_parameters", OBJECT, {})
    scaling = fields.get("rope_scaling", OBJECT, {})
    if local:
        inner = Fields(fields.path, parameters, "rope_parameters")
        parameters, windowed = (inner.get(kind, OBJECT, {}) for kind in (_FULL, _LOCAL))
        inner = Fields(fields.path, windowed, f"rope_parameters.{_LOCAL}")
        inner.only("rope_type", TEXT, "default")
        local = inner.get("rope_theta", POSITIVE, local)
        parameters = parameters | scaling
    elif any(isinstance(value, dict) for value in parameters.values()):
        raise fields.error("rope_parameters", "one set of parameters", parameters)
    else:
        parameters = scaling or parameters
    rope = Fields(fields.path, parameters, "rope_scaling" if scaling else "rope_parameters")
    rope.only("partial_rotary_factor", POSITIVE, 1)
    theta = rope.get("rope_theta", POSITIVE, theta)
    kind = rope.get("rope_type", TEXT, rope.get("type", TEXT, "default"))
    if kind == "linear":
        scales = ("linear", float(rope.get("factor", POSITIVE)))
    elif kind == "llama3":
        names = "factor", "low_freq_factor", "high_freq_factor"
        key = "original_max_position_embeddings"
        original = fields.get(key, COUNT, None) or rope.get(key, COUNT)
        scales = ("llama3", *(float(rope.get(name, POSITIVE)) for name in names), float(original))
        if scales[2] >= scales[3]:
            raise rope.error("low_freq_factor", f"less than {names[2]}={scales[3]}", scales[2])
    elif kind == "default":
        scales = ()
    else:
        raise rope.error("rope_type", '"default", "linear" or "llama3"', kind)
    return {
        "rope_theta": float(theta),
        "rope_theta_local": float(local),
        "rope_scaling": scales,
    }


def _windows(fields: Fields, num_layers: int, period: int) -> tuple[int, ...]:
    """Of each layer, the shortest row that repeats."""
    window = fields.get("sliding_window", COUNT, 0)
    if not window or not fields.get("use_sliding_window", FLAG, True):
        return ()
    kinds = fields.get("layer_types", LIST, None)
    if kinds is None:
        first = fields.get("max_window_layers", NUMBER, 0)
        period = fields.get("sliding_window_pattern", NUMBER, period)
        kinds = [
            _FULL if layer < first or (period and (layer + 1) % period == 0) else _LOCAL
            for layer in range(num_layers)
        ]
    if len(kinds) != num_layers or not all(kind in (_FULL, _LOCAL) for kind in kinds):
        expected = f"{num_layers} of {json.dumps(_FULL)} and {json.dumps(_LOCAL)}"
        raise fields.error("layer_types", expected, kinds)
    windows = [window if kind == _LOCAL else 0 for kind in kinds]
    if not any(windows):
        return ()
    period = next(
        size
        for size in range(1, num_layers + 1)
        if all(windows[i] == windows[i % size] for i in range(num_layers))
    )
    return tuple(windows[:period])


def _tokens(fields: Fields, vocab_size: int) -> dict[str, object]:
    """Ends, and what begins a text. One that is no token of the model can never come: left out."""
    eos = fields.get("eos_token_id", TOKENS, [])
    bos = fields.get("bos_token_id", TOKEN, None)
    ends = eos if isinstance(eos, list) else [eos]
    return {
        "bos_id": bos if bos is not None and bos < vocab_size else None,
        "eos_ids": tuple(end for end in ends if end < vocab_size),
    }


def family_of(config: Config) -> str:
    """The `model_type` of a model; raises InputError if its flags are those of no family."""

    def matches(name: str) -> bool:
        family = FAMILIES[name]
        expected = {flag: family.flags.get(flag, getattr(_PLAIN, flag)) for flag in _TELLING}
        experts = "num_experts" in family.keys
        same = all(getattr(config, flag) == value for flag, value in expected.items())
        return same and bool(config.num_experts) == experts

    names = list(filter(matches, FAMILIES))
    if not names:
        raise InputError(
            f"model: expected the flags of {', '.join(FAMILIES)}, found those of none of them"
        )
    # The last of llama and mistral, if there are windows.
    return names[-1] if config.windows else names[0]


_PLAIN = Config(1, 1, 1, 1, 1, 1, 2, 1)


def write(folder: pathlib.Path, config: Config, dtype: str) -> None:
    """Writes `config.json`; `transformers` reads a model from it, if it has such models."""
    name = family_of(config)
    family = FAMILIES[name]
    raw = {
        "architectures": [family.architecture],
        "model_type": name,
        family.activation[0]: family.activation[1],
        **{key: getattr(config, field) for field, key in family.keys.items()},
        "vocab_size": config.vocab_rows,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype,
    }
    if config.positions == "rotary":
        raw["rope_theta"] = config.rope_theta
        if config.rope_scaling:
            kind, *values = config.rope_scaling
            keys = "factor", "low_freq_factor", "high_freq_factor"
            raw["rope_scaling"] = {"rope_type": kind, **dict(zip(keys, values))}
            if kind == "llama3":
                original = int(config.rope_scaling[-1])
                raw["rope_scaling"]["original_max_position_embeddings"] = original
        if config.rope_theta_local:
            raw["rope_local_base_freq"] = config.rope_theta_local
    windows = [config.window(layer) for layer in range(config.num_layers)]
    features = {
        "sliding_window": max(windows) or (4096 if family.period else None),
        "use_sliding_window": any(windows),
        "max_window_layers": next((i for i, window in enumerate(windows) if window), len(windows)),
        "layer_types": [_LOCAL if window else _FULL for window in windows],
        "query_pre_attn_scalar": round((config.query_scale or config.head_dim**-0.5) ** -2),
        **{key: getattr(config, field) or None for field, key in _SOFTCAPS.items()},
    }
    if not family.period and all(windows) == any(windows):
        del features["layer_types"]  # the others say it, too
    raw |= {key: value for key, value in features.items() if key in family.absent}
    path = folder / "config.json"
    whole = dataclasses.replace(config, vocab_size=config.vocab_rows, padded_vocab_size=0)
    if _parse(path, raw) != whole:
        raise InputError(
            f"model: expected a shape that {name} can have, found {short_repr(config)}"
        )
    atomic_files.write(path, json.dumps(raw, indent=2) + "\n")
