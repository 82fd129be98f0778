"""Keys of rotary positions in config.json.

Older versions of transformers write `rope_theta`, `rope_scaling` and, for layers with a window,
`rope_local_base_freq`. Newer ones write all of them into `rope_parameters`. If a file has both,
`rope_scaling` takes precedence. The kind is `rope_type`, or `type` in older files.
"""

import math
from typing import Any

from spsjax.models.config import Config
from spsjax.models.hf.fields import COUNT, FLAG, OBJECT, POSITIVE, TEXT, Fields

_LOCAL, _FULL = "sliding_attention", "full_attention"
_ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
_FACTORS = (
    "a list of positive numbers",
    lambda x: type(x) is list and bool(x) and all(map(POSITIVE[1], x)),
)
_STRETCH = "a number >= 1", lambda x: POSITIVE[1](x) and x >= 1
SCALE = "a number >= 0", lambda x: type(x) in (int, float) and 0 <= x < 1e30  # 0: off
_ALIASES = {"su": "longrope"}


def read(
    fields: Fields, context: int, head_dim: int, partial: float | None = None
) -> dict[str, object]:
    """Returns the fields of `Config` for rotary positions, and the longest context with them.

    Args:
        fields: fields of the config, or of its section for the language model.
        context: value of `max_position_embeddings`.
        head_dim: width of a head.
        partial: default of `partial_rotary_factor`, the rotated share of each head; None: the
            family rotates whole heads.

    Raises:
        InputError: a scaling that is not supported, or that lacks a key.
    """
    theta, newer = fields.get("rope_theta", POSITIVE, 10_000.0), f"{fields.prefix}rope_parameters"
    local = fields.get("rope_local_base_freq", POSITIVE, 0.0)
    parameters = fields.get("rope_parameters", OBJECT, {})
    scaling = fields.get("rope_scaling", OBJECT, {})
    if local:
        for name in parameters:
            if name not in (_FULL, _LOCAL):  # one set of parameters would not say for which layers
                raise fields.error("rope_parameters", f"{_FULL} and {_LOCAL}", name)
        inner = Fields(fields.path, parameters, newer)
        parameters, windowed = (inner.get(kind, OBJECT, {}) for kind in (_FULL, _LOCAL))
        inner = Fields(fields.path, windowed, f"{newer}.{_LOCAL}")
        inner.only("rope_type", TEXT, "default")
        local = inner.get("rope_theta", POSITIVE, local)
        parameters, newer = parameters | scaling, f"{newer}.{_FULL}"
    elif any(isinstance(value, dict) for value in parameters.values()):
        raise fields.error("rope_parameters", "one set of parameters", parameters)
    else:
        parameters = scaling or parameters
    rope = Fields(fields.path, parameters, f"{fields.prefix}rope_scaling" if scaling else newer)
    theta = rope.get("rope_theta", POSITIVE, theta)
    kind = rope.get("rope_type", TEXT, rope.get("type", TEXT, "default"))
    kind = _ALIASES.get(kind, kind)
    if kind not in _KINDS:
        known = ", ".join(f'"{name}"' for name in _KINDS)
        raise rope.error("rope_type", f"one of {known}", kind)
    if kind == "yarn" and theta <= 1:  # the logarithm of the base is a divisor
        owner = rope if rope.raw.get("rope_theta") is not None else fields
        raise owner.error("rope_theta", "a number > 1", theta)
    # Which rotates a share of each head by frequencies of 0.
    whole = kind == "proportional"
    rotary_dim = 0 if whole else _rotary_dim(fields, rope, head_dim, partial)
    original = fields.get(_ORIGINAL, COUNT, None) or rope.get(_ORIGINAL, COUNT, None)
    values, context = _KINDS[kind](rope, original, context, rotary_dim or head_dim)
    return {
        "rotary_dim": rotary_dim,
        "rope_theta": float(theta),
        "rope_theta_local": float(local),
        "rope_scaling": values,
        "max_positions": context,
    }


def _rotary_dim(fields: Fields, rope: Fields, head_dim: int, partial: float | None) -> int:
    """Returns `Config.rotary_dim`; 0: whole heads are rotated."""
    if partial is None:
        rope.only(PARTIAL, POSITIVE, 1)
        return 0
    share = rope.get(PARTIAL, POSITIVE, fields.get(PARTIAL, POSITIVE, partial))
    size = int(head_dim * share)
    if size < 2 or size % 2 or size > head_dim:
        raise fields.error(PARTIAL, f"an even part of head_dim={head_dim}", share)
    return size if size < head_dim else 0


def _default(rope, original, context, head_dim):
    return (), context


def _linear(rope, original, context, head_dim):
    return ("linear", float(rope.get("factor", POSITIVE))), context


def _proportional(rope, original, context, head_dim):
    share = rope.get("partial_rotary_factor", POSITIVE, 1)
    if share > 1:
        raise rope.error("partial_rotary_factor", "a number up to 1", share)
    return ("proportional", float(share), float(rope.get("factor", POSITIVE, 1))), context


def _llama3(rope, original, context, head_dim):
    names = "factor", "low_freq_factor", "high_freq_factor"
    original = original or rope.get(_ORIGINAL, COUNT)
    factor, low, high = (float(rope.get(name, POSITIVE)) for name in names)
    if low >= high:
        raise rope.error("low_freq_factor", f"less than {names[2]}={high}", low)
    return ("llama3", factor, low, high, float(original)), context


def _yarn(rope, original, context, head_dim):
    original = original or context
    if original > context:
        raise rope.error(_ORIGINAL, f"at most max_position_embeddings={context}", original)
    factor = float(rope.get("factor", _STRETCH, context / original))
    fast, slow = rope.get("beta_fast", POSITIVE, 32), rope.get("beta_slow", POSITIVE, 1)
    if slow >= fast:
        raise rope.error("beta_slow", f"less than beta_fast={fast}", slow)
    scales = rope.get("mscale", SCALE, 0), rope.get("mscale_all_dim", SCALE, 0)
    attention = yarn_attention(factor, 1)
    if all(scales):
        attention = yarn_attention(factor, scales[0]) / yarn_attention(factor, scales[1])
    attention = float(rope.get("attention_factor", POSITIVE, attention))
    numbers = factor, float(fast), float(slow), float(original), attention
    values = ("yarn", *numbers, rope.get("truncate", FLAG, True))
    return values, _stretched(rope, context, factor, original)


def _stretched(rope, context, factor, original):
    """Returns the longest context; raises InputError if it has more tokens than an int32 counts."""
    longest = max(context, math.floor(factor * original))
    if longest >= 2**31:
        raise rope.error("factor", f"less than 2**31 / {original}, the original context", factor)
    return longest


def yarn_attention(factor: float, scale: float) -> float:
    """Returns YaRN's factor of attention, by the factor of the context (arXiv 2309.00071, 3.4)."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _dynamic(rope, original, context, head_dim):
    rope.only("alpha", POSITIVE, None)
    factor = float(rope.get("factor", _STRETCH))
    return ("dynamic", factor, float(context)), _stretched(rope, context, factor, context)


def _longrope(rope, original, context, head_dim):
    original = original or context
    short, long = (tuple(rope.get(f"{which}_factor", _FACTORS)) for which in ("short", "long"))
    for which, factors in (("short", short), ("long", long)):
        if len(factors) != head_dim // 2:
            raise rope.error(f"{which}_factor", f"{head_dim // 2} numbers", list(factors))
    if original < 2:  # its logarithm is a divisor
        raise rope.error(_ORIGINAL, "at least 2", original)
    factor = rope.get("factor", POSITIVE, context / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention = float(rope.get("attention_factor", POSITIVE, attention))
    # Beyond the original context the long factors apply to all tokens. Keys in the cache were
    # rotated with the short factors, so the context ends there.
    usable = context if short == long else min(original, context)
    return ("longrope", attention, original, context, short, long), usable


_KINDS = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _dynamic,
    "longrope": _longrope,
}
# Keys of the numbers in `Config.rope_scaling`, in their order.
_NAMES = {
    "linear": ("factor",),
    "proportional": ("partial_rotary_factor", "factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "beta_fast", "beta_slow", _ORIGINAL, "attention_factor", "truncate"),
    "dynamic": ("factor", "max_position_embeddings"),
    "longrope": (
        *("attention_factor", _ORIGINAL, "max_position_embeddings"),
        *("short_factor", "long_factor"),
    ),
}


def keys(config: Config) -> dict[str, Any]:
    """Returns the keys of rotary positions, in the spelling of older versions of transformers."""
    if config.positions != "rotary":
        return {}
    raw: dict[str, Any] = {"rope_theta": config.rope_theta}
    if config.rope_scaling:
        kind, *values = config.rope_scaling
        values = [list(value) if isinstance(value, tuple) else value for value in values]
        scaling = {"rope_type": kind} | dict(zip(_NAMES[kind], values))
        for name in (_ORIGINAL, "max_position_embeddings"):
            if name in scaling:
                scaling[name] = int(scaling[name])
        whole = scaling.pop("max_position_embeddings", None)
        raw |= {"rope_scaling": scaling} | ({"max_position_embeddings": whole} if whole else {})
    if config.rope_theta_local:
        raw["rope_local_base_freq"] = config.rope_theta_local
    if config.rotary_dim:
        raw[PARTIAL] = config.rotary_dim / config.head_dim
    return raw
