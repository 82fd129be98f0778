"""Gemma 4 in the Hugging Face layout: its names, and the keys of its config.json.

Layers with full attention have other heads than layers with a window, and the last layers may have
no keys and values of their own. `Config.changes` says so per layer.
"""

import dataclasses
from typing import Any

from spsjax.models.config import Config
from spsjax.models.hf.family import (
    BARE,
    DEFAULTS,
    LAYER,
    OTHER,
    POST_NORMS,
    QK_NORMS,
    TANH,
    Family,
    Wrapper,
    check_layers,
    shortest_cycle,
)
from spsjax.models.hf.fields import COUNT, EVEN, FLAG, NUMBER, OBJECT, Fields
from spsjax.models.hf.locations import Part

_FLAGS: dict[str, Any] = {
    "ffn": "geglu",
    "embed_scale": True,
    "post_norms": True,
    "qk_norm": True,
    "value_norm": True,
    "output_scale": True,
}
# Keys of `per_layer_config`, and fields of `Config`.
_OF_LAYER = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}


def read(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Config` that this family derives from its own keys.

    Args:
        fields: keys of config.json, with the family's defaults.
        values: fields of `Config` that other families read in the same way.

    Raises:
        InputError: a key of a feature that is not supported, or of a wrong value.
    """
    check_layers(fields, values["num_layers"])
    mixture = _mixture(fields, values["d_ff"])
    count, windows = values["num_layers"], values["windows"] or (0,)
    windows = [windows[layer % len(windows)] for layer in range(count)]
    windows[-1] = 0  # as transformers does, whatever `layer_types` says
    fields.get("sliding_window", COUNT)  # a null would turn layers with a window into full ones
    _check_rope(fields, any(windows))
    num_shared = fields.get("num_kv_shared_layers", NUMBER, 0)
    if num_shared > count:
        raise fields.error("num_kv_shared_layers", f"at most {count} layers", num_shared)
    first, double = count - num_shared, fields.get("use_double_wide_mlp", FLAG, False)
    of_layers = _per_layer(fields, windows, values["num_heads"])
    is_value = fields.get("attention_k_eq_v", FLAG, False)
    changes = []
    for layer, window in enumerate(windows):
        change: dict[str, Any] = {
            name: own for name, own in of_layers[layer].items() if own != values[name]
        }
        if is_value and not window:
            change["value_is_key"] = True
        if layer >= first:
            change["mixer"] = "shared"
            if double and first > 0:
                change["shared_d_ff" if mixture else "d_ff"] = 2 * values["d_ff"]
        changes.append(tuple(sorted(change.items())))
    width = fields.get("hidden_size_per_layer_input", NUMBER, 256)
    rows = fields.get("vocab_size_per_layer_input", NUMBER, 262_144) if width else 0
    if width and rows < values["vocab_size"]:
        expected = f"at least vocab_size={values['vocab_size']}"
        raise fields.error("vocab_size_per_layer_input", expected, rows)
    config = {
        "windows": shortest_cycle(windows) if any(windows) else (),
        "changes": shortest_cycle(changes) if any(changes) else (),
        "layer_inputs": width,
        "layer_input_rows": 0 if rows == values["vocab_size"] else rows,
        "query_scale": 1.0,
        **mixture,
    }
    if 0 < first < count:
        _check_sources(fields, Config(**_FLAGS | values | config), num_shared)
    return config


def _check_rope(fields: Fields, has_windows: bool) -> None:
    """Raises InputError unless each kind of layer has its rotary positions, which have no default.

    They cannot be of a kind with numbers per entry of a head, because the heads of layers differ.
    """
    name = f"{fields.prefix}rope_parameters"
    rope = Fields(fields.path, fields.get("rope_parameters", OBJECT), name)
    for kind in ("sliding_attention",) * has_windows + ("full_attention",):
        inner = Fields(fields.path, rope.get(kind, OBJECT), f"{name}.{kind}")
        if "longrope" in (of_kind := inner.raw.get("rope_type"), inner.raw.get("type")):
            raise inner.error("rope_type", "another scaling than longrope", of_kind or "longrope")


def _mixture(fields: Fields, wide: int) -> dict[str, Any]:
    """Returns the fields of a mixture of experts beside a network of width `wide`."""
    if not fields.get("enable_moe_block", FLAG, False):
        return {}
    experts, used = fields.get("num_experts", COUNT), fields.get("top_k_experts", COUNT)
    if used > experts:
        raise fields.error("top_k_experts", f"at most num_experts={experts}", used)
    return {
        "router": "scaled",
        "num_experts": experts,
        "experts_per_token": used,
        "d_ff": fields.get("moe_intermediate_size", COUNT),
        "shared_d_ff": wide,
    }


def _per_layer(fields: Fields, windows: list[int], heads: int) -> list[dict[str, int]]:
    """Returns the sizes of heads in which layers may differ, by layer and field of `Config`."""
    divisor = f"a divisor of num_attention_heads={heads}"
    kinds = {
        "head_dim": EVEN,
        "num_key_value_heads": (divisor, lambda x: COUNT[1](x) and heads % x == 0),
    }
    own = fields.get("per_layer_config", OBJECT, None)
    if own is None:
        full = {"head_dim": fields.get("global_head_dim", EVEN, 512)}
        groups = fields.get("num_global_key_value_heads", COUNT, None)
        if groups and fields.get("attention_k_eq_v", FLAG, False):
            kind = kinds["num_key_value_heads"]
            full["num_kv_heads"] = fields.get("num_global_key_value_heads", kind)
        return [{} if window else full for window in windows]
    sizes: list[dict[str, int]] = [{} for _ in windows]
    for name in own:
        layer = int(name) if name.isascii() and name.isdecimal() and len(name) < 9 else len(windows)
        if layer >= len(windows):
            raise fields.error("per_layer_config", f"layers below {len(windows)}", name)
        raw = Fields(fields.path, own, "per_layer_config").get(name, OBJECT)
        inner = Fields(fields.path, raw, f"per_layer_config.{name}")
        for key in raw:
            if key not in _OF_LAYER:
                raise fields.error("per_layer_config", f"keys {', '.join(_OF_LAYER)}", key)
            sizes[layer][_OF_LAYER[key]] = inner.get(key, kinds[key])
    return sizes


def _check_sources(fields: Fields, config: Config, num_shared: int) -> None:
    """Raises InputError unless all layers without keys have a layer whose keys they can read."""
    for layer in range(config.num_layers):
        try:
            config.source(layer)
        except ValueError as error:
            raise fields.error(
                "num_kv_shared_layers", f"fewer layers ({error})", num_shared
            ) from None


def write(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with this family's own keys; `raw` has those of all families."""
    layers = [config.layer(layer) for layer in range(config.num_layers)]
    full = next((layer for layer in layers if not layer.windows), config)
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    rope |= raw.pop("rope_scaling", {})
    local = {"rope_type": "default", "rope_theta": raw.pop("rope_local_base_freq", 10_000.0)}
    rows, is_mixture = config.layer_input_rows or config.vocab_rows, config.num_experts > 0
    widths = [layer.shared_d_ff if is_mixture else layer.d_ff for layer in (config, *layers)]
    own = {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.value_is_key,
        "num_global_key_value_heads": full.num_kv_heads,
        "num_kv_shared_layers": sum(layer.mixer == "shared" for layer in layers),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": max(widths) > widths[0],
        "enable_moe_block": is_mixture,
        "num_experts": config.num_experts or None,
        "top_k_experts": config.experts_per_token or None,
        "moe_intermediate_size": config.d_ff if is_mixture else None,
        "hidden_size_per_layer_input": config.layer_inputs,
        "vocab_size_per_layer_input": rows if config.layer_inputs else 0,
    }
    return raw | own


def _experts(layer: Config) -> dict[str, Part]:
    """Returns the tensors of the experts of a layer, by parameter."""
    if not layer.num_experts:
        return {}
    both = layer.d_ff, layer.d_ff
    return {
        "ffn.experts_gate": Part("experts.gate_up_proj", both, 0),
        "ffn.experts_up": Part("experts.gate_up_proj", both, 1),
        "ffn.experts_down": Part("experts.down_proj"),
    }


_TEXT = Family(
    "Gemma4ForCausalLM",
    _FLAGS,
    layer_names=LAYER
    | QK_NORMS
    | POST_NORMS
    | {
        "scale": "layer_scalar",
        "input.input_gate": "per_layer_input_gate",
        "input.input_out": "per_layer_projection",
        "input.norm": "post_per_layer_input_norm",
        "ffn.shared.gate": "mlp.gate_proj",
        "ffn.shared.up": "mlp.up_proj",
        "ffn.shared.down": "mlp.down_proj",
        "ffn.shared_post_norm": "post_feedforward_layernorm_1",
        "ffn.mixture_norm": "pre_feedforward_layernorm_2",
        "ffn.mixture_post_norm": "post_feedforward_layernorm_2",
        "ffn.router": "router.proj",
        "ffn.router_norm.scale": "router.scale",
        "ffn.scale": "router.per_expert_scale",
    },
    # `alternatives`, too, so that a tensor of all experts counts as one.
    parts=_experts,
    alternatives=_experts,
    other_names=OTHER
    | {
        "inputs.input_table": "model.embed_tokens_per_layer",
        "inputs.input_projection": "model.per_layer_model_projection",
        "inputs.norm": "model.per_layer_projection_norm",
    },
    **TANH,
    # Images and sounds are not read, and neither are keys of layers that share others' keys.
    ignored=r"(model\.)?(vision_tower|audio_tower|vision_embedder|embed_vision|embed_audio)\..*"
    r"|.*\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight",
    aliases=BARE
    | {
        "embed_tokens_per_layer.": "model.embed_tokens_per_layer.",
        "per_layer_model_projection.": "model.per_layer_model_projection.",
        "per_layer_projection_norm.": "model.per_layer_projection_norm.",
        "language_model.model.": "model.",
        "model.language_model.": "model.",
    },
    defaults=DEFAULTS
    | {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "layer_types": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "rope_local_base_freq": 10_000.0,  # there are two sets of parameters, by kind of layer
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
    full_attention_every=6,
    nested_in=Wrapper("gemma4", "text_config"),
    varying=("router", "num_experts"),
    read=read,
    write=write,
)
# The model without an encoder of images (12B) has the same text model.
_UNIFIED = dataclasses.replace(
    _TEXT,
    architecture="Gemma4UnifiedForCausalLM",
    defaults=_TEXT.defaults
    | {
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
        "hidden_size_per_layer_input": 0,
    },
    nested_in=Wrapper("gemma4_unified", "text_config"),
)
FAMILIES = {"gemma4_text": _TEXT, "gemma4_unified_text": _UNIFIED}
