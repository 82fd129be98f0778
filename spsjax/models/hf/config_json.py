"""Conversion between Hugging Face's `config.json` and `Config`."""

import dataclasses
import json
import os
import pathlib
import re
from typing import Any

from spsjax.errors import InputError, short_repr
from spsjax.models.config import Config
from spsjax.models.hf import rope_json
from spsjax.models.hf.families import FAMILIES, FEATURES
from spsjax.models.hf.family import Family, check_layers, shortest_cycle
from spsjax.models.hf.fields import (
    COUNT,
    EVEN,
    FLAG,
    LIST,
    NUMBER,
    OBJECT,
    POSITIVE,
    TEXT,
    TOKEN,
    TOKENS,
    Fields,
    read_json,
)
from spsjax.utils import atomic_files

_KINDS = {"head_dim": EVEN, "norm_eps": POSITIVE, "renormalize": FLAG}
# Keys whose null means "off": no window, no cap. A null of other keys means the default.
_NULL = (
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "q_lora_rank",
    "n_shared_experts",
)
_SOFTCAPS = {
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_BOS_AND_EOS = "bos_token_id", "eos_token_id"
# Files of any family have one of these keys.
_EXPERTS = "num_experts", "num_local_experts"
_LOCAL, _FULL = "sliding_attention", "full_attention"
# Flags that identify a family. Other flags, such as sliding windows, vary within a family.
_IDENTIFYING = (
    *("positions", "ffn", "norm", "norm_offset", "post_norms", "qk_norm", "biases"),
    *("mixer", "router", "attention_gate", "layout"),
)


def read(folder: pathlib.Path) -> Config:
    """Reads the config of the model in `folder`.

    Raises InputError if the family is not supported, or if a field cannot be used.
    """
    path = folder / "config.json"
    if os.access(folder, os.X_OK) and not path.exists():
        raise InputError(f"{folder}: expected a model folder with config.json, found none")
    config = parse(path, read_json(path))
    generation = folder / "generation_config.json"
    if generation.exists():
        # For chat models, neither file has all end-of-sequence ids.
        more = _tokens(Fields(generation, read_json(generation)), config.vocab_size)["eos_ids"]
        config = dataclasses.replace(config, eos_ids=tuple(dict.fromkeys(config.eos_ids + more)))
    return config


def parse(path: pathlib.Path, raw: dict, parent: str = "") -> Config:
    """Returns the config that a JSON object describes.

    `path` is its file, and `parent` the field with the object in that file, for messages.
    """
    name, fields = _family(Fields(path, raw, parent))
    family = FAMILIES[name]
    _check_plain(fields, family)
    values = _sizes(fields, family)
    rotary = values["max_positions"], values["head_dim"], family.defaults.get(rope_json.PARTIAL)
    values |= rope_json.read(fields, *rotary)
    values["windows"] = _windows(fields, values["num_layers"], family.full_attention_every)
    for field, key in _SOFTCAPS.items():
        values[field] = float(fields.get(key, POSITIVE, 0.0))
    # Queries are scaled by scalar**-0.5. `Config` writes the usual head_dim**-0.5 as 0.
    scalar = fields.get("query_pre_attn_scalar", POSITIVE, values["head_dim"])
    values["query_scale"] = 0.0 if scalar == values["head_dim"] else float(scalar) ** -0.5
    values["tie_embeddings"] = fields.get("tie_word_embeddings", FLAG, False)
    values |= _tokens(fields, values["vocab_size"])
    values |= family.read(fields, values)
    eos = fields.raw.get("eos_token_id")
    if not values["eos_ids"] and eos not in (None, [], family.defaults.get("eos_token_id")):
        raise fields.error(
            "eos_token_id", f"an id in the vocabulary of {values['vocab_size']}", eos
        )
    try:
        return Config(**family.flags | values)
    except ValueError as error:
        raise InputError(f"{path}: {_by_keys(str(error), fields, family)}") from None


def _by_keys(message: str, fields: Fields, family: Family) -> str:
    """Returns a message of `Config` with keys of config.json in place of the names of its fields.

    A message that begins with another name is not about a single key.
    """
    prefix = fields.prefix if message.partition(":")[0] in family.keys else ""
    names = rf"\b({'|'.join(family.keys)})\b"
    return prefix + re.sub(names, lambda match: family.keys[match[0]], message)


def _family(fields: Fields) -> tuple[str, Fields]:
    """Returns the family's name, and the fields with the family's defaults."""
    name = fields.get("model_type", TEXT)
    if fields.raw.get("quantization_config") is not None:
        raise InputError(
            f"{fields.path}: quantization_config: expected none, found one. "
            "Quantized weights are not supported."
        )
    wrapped = {
        family.nested_in.model_type: (inner, family.nested_in.key)
        for inner, family in FAMILIES.items()
        if family.nested_in
    }
    if name in wrapped:
        name, key = wrapped[name]
        # The wrapper's special tokens take precedence: the inner config may list fewer of them.
        special = {id: fields.raw[id] for id in _BOS_AND_EOS if fields.raw.get(id) is not None}
        fields = Fields(fields.path, fields.raw | fields.get(key, OBJECT) | special, key)
    elif name not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *wrapped]))
        raise fields.error("model_type", f"one of {known}", name)
    defaults = FAMILIES[name].defaults
    used = {
        key: value
        for key, value in fields.raw.items()
        if (value is not None or key in _NULL) and (key in defaults or key not in FEATURES)
    }
    fields.raw = defaults | used
    return name, fields


def _check_plain(fields: Fields, family: Family) -> None:
    """Raises InputError if a flag asks for a feature that the decoder does not have."""
    names = family.activation, *family.activation_aliases
    activation = fields.get(family.activation_key, TEXT, family.activation)
    if activation not in names:
        raise fields.error(family.activation_key, " or ".join(map(json.dumps, names)), activation)
    for key in ("attention_bias", "mlp_bias", "add_cross_attention"):
        if key not in family.defaults:
            fields.only(key, FLAG, False)
    both_ways = fields.raw.get("use_bidirectional_attention")
    if both_ways not in (None, False, "vision"):  # texts are read from left to right
        raise fields.error("use_bidirectional_attention", 'false or "vision"', both_ways)
    fields.only("scale_attn_by_inverse_layer_idx", FLAG, False)
    fields.only("scale_attn_weights", FLAG, True)
    fields.only("decoder_sparse_step", NUMBER, 1)
    fields.only("mlp_only_layers", LIST, [])


def _sizes(fields: Fields, family: Family) -> dict[str, Any]:
    """Returns the fields of `Config` for the family's keys, including all sizes."""
    sizes = {}
    for field, key in family.keys.items():
        if field == "num_experts" and fields.raw.get(key) is None:
            key = next(name for name in _EXPERTS if name != key)
        value = fields.get(key, _KINDS.get(field, COUNT), None)
        if value is not None:
            sizes[field] = float(value) if field == "norm_eps" else value
    if family.ffn_ratio and "d_model" in sizes:
        sizes.setdefault("d_ff", family.ffn_ratio * sizes["d_model"])
    for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "max_positions"):
        if field not in sizes:
            fields.get(family.keys[field], COUNT)  # raises the error of a missing field
    heads, d_model = sizes["num_heads"], sizes["d_model"]
    sizes.setdefault("num_kv_heads", heads)
    if "head_dim" not in sizes:
        if d_model % (2 * heads):
            expected = f"an even multiple of {family.keys['num_heads']}={heads}"
            raise fields.error(family.keys["d_model"], expected, d_model)
        sizes["head_dim"] = d_model // heads
    if heads % (groups := sizes["num_kv_heads"]):
        expected = f"a multiple of {family.keys['num_kv_heads']}={groups}"
        raise fields.error(family.keys["num_heads"], expected, heads)
    return sizes


def _windows(fields: Fields, num_layers: int, full_attention_every: int) -> tuple[int, ...]:
    """Returns the window of each layer (0: none), as the shortest sequence that repeats."""
    window = fields.get("sliding_window", COUNT, 0)
    if not window or not fields.get("use_sliding_window", FLAG, True):
        return ()
    check_layers(fields, num_layers)
    kinds = fields.get("layer_types", LIST, None)
    if kinds is None:
        first = fields.get("max_window_layers", NUMBER, 0)
        every = fields.get("sliding_window_pattern", NUMBER, full_attention_every)
        kinds = [
            _FULL if layer < first or (every and (layer + 1) % every == 0) else _LOCAL
            for layer in range(num_layers)
        ]
    if len(kinds) != num_layers or not all(kind in (_FULL, _LOCAL) for kind in kinds):
        expected = f"{num_layers} of {json.dumps(_FULL)} and {json.dumps(_LOCAL)}"
        raise fields.error("layer_types", expected, kinds)
    windows = [window if kind == _LOCAL else 0 for kind in kinds]
    if not any(windows):
        return ()
    return shortest_cycle(windows)


def _tokens(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """Returns the beginning- and end-of-sequence ids, without ids beyond the vocabulary.

    Defaults of some families exceed the vocabulary of small models, and some published models list
    ids that their vocabulary lacks. Such ids can never be sampled.
    """
    eos = fields.get("eos_token_id", TOKENS, [])
    bos = fields.get("bos_token_id", TOKEN, None)
    eos_ids = eos if isinstance(eos, list) else [eos]
    return {
        "bos_id": bos if bos is not None and bos < vocab_size else None,
        "eos_ids": tuple(id for id in eos_ids if id < vocab_size),
    }


def family_of(config: Config) -> str:
    """Returns the `model_type` of a model; raises InputError if no family has its flags."""

    def matches(name: str) -> bool:
        family = FAMILIES[name]
        flags = set(_IDENTIFYING).difference(family.varying)
        expected = {flag: family.flags.get(flag, getattr(_PLAIN, flag)) for flag in flags}
        kinds = {"num_experts" in family.keys}
        kinds |= {True, False} if "num_experts" in family.varying else set()
        same = all(getattr(config, flag) == value for flag, value in expected.items())
        return same and bool(config.num_experts) in kinds

    names = list(filter(matches, FAMILIES))
    if not names:
        raise InputError(
            f"model: expected the flags of one of {', '.join(FAMILIES)}, found other flags"
        )
    # Only llama and mistral have the same flags, and only mistral has windows.
    return "mistral" if config.windows and "mistral" in names else names[0]


# Config with the default of every flag. The sizes do not matter.
_PLAIN = Config(1, 1, 1, 1, 1, 1, 2, 1)


def write(folder: pathlib.Path, config: Config, dtype: str) -> None:
    """Writes a `config.json` that `transformers` and `read` accept.

    Raises InputError if the layout cannot express the config.
    """
    atomic_files.write(folder / "config.json", json.dumps(to_json(config, dtype), indent=2) + "\n")


def to_json(config: Config, dtype: str) -> dict[str, object]:
    """Returns the content of `config.json`; raises InputError if it cannot express the config."""
    name = family_of(config)
    family = FAMILIES[name]
    raw = {
        "architectures": [family.architecture],
        "model_type": name,
        family.activation_key: family.activation,
        **{key: getattr(config, field) for field, key in family.keys.items()},
        "vocab_size": config.vocab_rows,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype,
        **rope_json.keys(config),
        **_feature_keys(config, family),
    }
    raw = family.write(config, raw)
    # A config.json has no key for padding: the tokenizer says which rows have tokens.
    expected = dataclasses.replace(config, vocab_size=config.vocab_rows, padded_vocab_size=0)
    if parse(pathlib.Path("config.json"), raw) != expected:
        raise InputError(
            f"model: expected a shape that {name} can have, found {short_repr(config)}"
        )
    return raw


def _feature_keys(config: Config, family: Family) -> dict[str, object]:
    """Returns the keys of windows, caps and query scale that the family uses."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    first = next((layer for layer, window in enumerate(windows) if window), len(windows))
    features = {
        # Families with a pattern of windows need a number, even if no layer has a window.
        "sliding_window": max(windows) or (4096 if family.full_attention_every else None),
        "use_sliding_window": any(windows),
        "max_window_layers": first,
        "layer_types": [_LOCAL if window else _FULL for window in windows],
        "query_pre_attn_scalar": round((config.query_scale or config.head_dim**-0.5) ** -2),
        **{key: getattr(config, field) or None for field, key in _SOFTCAPS.items()},
    }
    if not family.full_attention_every and all(windows) == any(windows):
        del features["layer_types"]  # the other keys imply it
    return {key: value for key, value in features.items() if key in family.defaults}
