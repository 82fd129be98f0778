"""Families with gated delta nets beside attention: Qwen3-Next and Qwen3.5."""

import json
from typing import Any

from spsjax.models.config import Config
from spsjax.models.hf.family import (
    BARE,
    DEFAULTS,
    EXPERTS,
    KEYS,
    LAYER,
    QK_NORMS,
    Family,
    Wrapper,
    check_layers,
)
from spsjax.models.hf.fields import COUNT, FLAG, LIST, Fields
from spsjax.models.hf.locations import Part
from spsjax.models.hf.rope_json import PARTIAL

_LINEAR, _FULL = "linear_attention", "full_attention"
# Keys of the sizes of a gated delta net, by field of the layer's own config.
_SIZES = {
    "num_heads": "linear_num_value_heads",
    "num_kv_heads": "linear_num_key_heads",
    "head_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "delta_taps": "linear_conv_kernel_dim",
}
# What a gated delta net does not have, in a model whose attention has it.
_OFF = {"attention_gate": False, "qk_norm": False, "rotary_dim": 0}


def _read(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Config` that say which layers are gated delta nets, and their sizes.

    Raises InputError for another kind of layer, or if no layer has attention.
    """
    count = values["num_layers"]
    check_layers(fields, count)
    fields.only("attn_output_gate", FLAG, True)
    every = fields.get("full_attention_interval", COUNT)
    kinds = fields.get("layer_types", LIST, None)
    if kinds is None:
        if every > count:
            raise fields.error("full_attention_interval", f"at most {count} layers", every)
        kinds = [_LINEAR if (layer + 1) % every else _FULL for layer in range(count)]
    if len(kinds) != count or not {*map(str, kinds)} <= {_LINEAR, _FULL} or _FULL not in kinds:
        expected = f"{count} of {json.dumps(_LINEAR)} and, at least once, {json.dumps(_FULL)}"
        raise fields.error("layer_types", expected, kinds)
    sizes = {field: fields.get(key, COUNT) for field, key in _SIZES.items()}
    groups, key = sizes["num_kv_heads"], _SIZES["num_heads"]
    if sizes["num_heads"] % groups:
        multiple = f"a multiple of {_SIZES['num_kv_heads']}={groups}"
        raise fields.error(key, multiple, sizes["num_heads"])
    delta = tuple({"mixer": "delta", **sizes, **_OFF}.items())
    changes = [delta if kind == _LINEAR else () for kind in kinds]
    if not any(changes):
        return {}
    period = next(
        size
        for size in range(1, count + 1)
        if all(changes[layer] == changes[layer % size] for layer in range(count))
    )
    return {"changes": tuple(changes[:period])}


def _write(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the keys that `_read` takes."""
    layers = [config.layer(layer) for layer in range(config.num_layers)]
    deltas = [layer for layer in layers if layer.mixer == "delta"]
    sizes = {key: getattr(deltas[0], field) for field, key in _SIZES.items()} if deltas else {}
    kinds = [_LINEAR if layer.mixer == "delta" else _FULL for layer in layers]
    return raw | {"layer_types": kinds, **sizes}


_WHOLE = {
    "attention.out.kernel": Part("linear_attn.out_proj.weight"),
    "attention.scale": Part("linear_attn.norm.weight"),
    "attention.decay_rate": Part("linear_attn.A_log"),
    "attention.decay_bias": Part("linear_attn.dt_bias"),
}


def _parts_of(tensor: str, sizes: dict[str, int], **more) -> dict[str, Part]:
    """Returns the parts of a tensor, by parameter."""
    widths = tuple(sizes.values())
    return {name: Part(tensor, widths, index, **more) for index, name in enumerate(sizes)}


def _filters(layer: Config) -> dict[str, Part]:
    """Returns the tensors of a gated delta net which both families store alike."""
    keys, values = layer.num_kv_heads * layer.head_dim, layer.num_heads * layer.value_dim
    sizes = {"query": keys, "key": keys, "value": values}
    taps = {f"attention.{name}_taps": size for name, size in sizes.items()}
    return _WHOLE | _parts_of("linear_attn.conv1d.weight", taps, is_filter=True)


def _by_groups(layer: Config) -> dict[str, Part]:
    """Returns the tensors of Qwen3-Next's gated delta net, in which each key head is a group."""
    if layer.mixer != "delta":
        return {}
    heads = layer.num_heads // layer.num_kv_heads
    keys, values = layer.head_dim, heads * layer.value_dim
    sizes = {"query": keys, "key": keys, "value": values, "gate": values}
    inputs = {f"attention.{name}.kernel": size for name, size in sizes.items()}
    scalars = {f"attention.{name}.kernel": heads for name in ("strength", "decay")}
    return {
        **_filters(layer),
        **_parts_of("linear_attn.in_proj_qkvz.weight", inputs),
        **_parts_of("linear_attn.in_proj_ba.weight", scalars),
    }


def _side_by_side(layer: Config) -> dict[str, Part]:
    """Returns the tensors of Qwen3.5's gated delta net."""
    if layer.mixer != "delta":
        return {}
    keys, values = layer.num_kv_heads * layer.head_dim, layer.num_heads * layer.value_dim
    sizes = {"query": keys, "key": keys, "value": values}
    return {
        **_filters(layer),
        **_parts_of(
            "linear_attn.in_proj_qkv.weight",
            {f"attention.{name}.kernel": size for name, size in sizes.items()},
        ),
        "attention.gate.kernel": Part("linear_attn.in_proj_z.weight"),
        "attention.strength.kernel": Part("linear_attn.in_proj_b.weight"),
        "attention.decay.kernel": Part("linear_attn.in_proj_a.weight"),
    }


def fused_experts(layer: Config) -> dict[str, Part]:
    """Returns the tensors of all experts together, as released folders of Qwen3.5 have them."""
    both = {f"ffn.experts_{name}": layer.d_ff for name in ("gate", "up")}
    return {
        **_parts_of("mlp.experts.gate_up_proj", both),
        "ffn.experts_down": Part("mlp.experts.down_proj"),
    }


_FLAGS = {"norm_offset": 1.0, "qk_norm": True, "attention_gate": True}
_MIXTURE_FLAGS = _FLAGS | {"shared_gate": True}
_SHARED = {
    f"ffn.shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
}
_SHARED |= {"ffn.shared_gate": "mlp.shared_expert_gate"}
_MIXTURE_KEYS = KEYS | {
    "d_ff": "moe_intermediate_size",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_d_ff": "shared_expert_intermediate_size",
}
_DEFAULTS = DEFAULTS | {
    "head_dim": 256,
    PARTIAL: 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MIXTURE_DEFAULTS = _DEFAULTS | {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# The multi-token prediction head is a drafter, and not part of the model.
_IGNORED = r".*\.rotary_emb\.inv_freq|mtp\..*|(model\.)?visual\..*"
_ALIASES = BARE | {"model.language_model.": "model.", "language_model.model.": "model."}

FAMILIES = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _MIXTURE_FLAGS,
        layer_names=LAYER | QK_NORMS | EXPERTS | _SHARED,
        keys=_MIXTURE_KEYS | {"renormalize": "norm_topk_prob"},
        ignored=_IGNORED,
        defaults=_MIXTURE_DEFAULTS | {"num_experts": 512, "num_experts_per_tok": 10},
        read=_read,
        write=_write,
        parts=_by_groups,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _FLAGS,
        layer_names=LAYER | QK_NORMS,
        ignored=_IGNORED,
        aliases=_ALIASES,
        defaults=_DEFAULTS,
        nested_in=Wrapper("qwen3_5", "text_config"),
        read=_read,
        write=_write,
        parts=_side_by_side,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _MIXTURE_FLAGS | {"layout": "qwen3_5_moe_text"},
        layer_names=LAYER | QK_NORMS | EXPERTS | _SHARED,
        keys=_MIXTURE_KEYS,
        ignored=_IGNORED,
        aliases=_ALIASES,
        defaults=_MIXTURE_DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8},
        nested_in=Wrapper("qwen3_5_moe", "text_config"),
        read=_read,
        write=_write,
        parts=_side_by_side,
        alternatives=fused_experts,
    ),
}
