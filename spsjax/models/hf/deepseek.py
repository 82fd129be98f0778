"""Families with mixtures as in DeepSeek-V3 (arXiv 2412.19437): its own, and GLM-4.5 and later.

Their first layers are dense. Layers behind the last one predict further tokens, and belong to a
drafter.
"""

import math
from typing import Any

from spsjax.models.config import Config
from spsjax.models.hf import rope_json
from spsjax.models.hf.family import (
    DEFAULTS,
    EXPERTS,
    KEYS,
    LAYER,
    QK_NORMS,
    Family,
    check_layers,
)
from spsjax.models.hf.fields import COUNT, FLAG, LIST, NUMBER, OBJECT, POSITIVE, TEXT, Fields
from spsjax.models.hf.head_rows import HeadRows

_DENSE, _SPARSE = "dense", "sparse"
# Of the layer of a head for multi-token prediction, and of no other layer (`drafters.mtp`).
_PREDICTOR = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
_GROUPS = {"expert_groups": "n_group", "groups_per_token": "topk_group"}
_MIXTURE_KEYS = (
    KEYS
    | _GROUPS
    | {
        "d_ff": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "renormalize": "norm_topk_prob",
    }
)
# Until `_read_latent` knows the other part of a head, it has the part that is rotated.
_LATENT_KEYS = {field: key for field, key in _MIXTURE_KEYS.items() if field != "num_kv_heads"} | {
    "head_dim": "qk_rope_head_dim"
}
_MIXTURE_LAYER = EXPERTS | {
    "ffn.choice_bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}
_LATENT_LAYER = LAYER | {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.latent": "self_attn.kv_a_proj_with_mqa",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.key_up": "self_attn.kv_b_proj",
    "attention.value_up": "self_attn.kv_b_proj",
}
_DEFAULTS = DEFAULTS | {
    "attention_bias": False,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


def _read_mixture(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Config` for mixtures, and for the dense layers between them."""
    fields.only("scoring_func", TEXT, "sigmoid")
    fields.only("topk_method", TEXT, "noaux_tc")
    fields.only("moe_layer_freq", COUNT, 1)
    _check_groups(fields, values)
    wide = fields.get("intermediate_size", COUNT)
    dense = ("d_ff", wide), ("num_experts", 0)
    kinds = _layer_kinds(fields, values["num_layers"])
    changes = tuple(dense if kind == _DENSE else () for kind in kinds)
    return {
        "changes": changes if any(changes) else (),
        "shared_d_ff": fields.get("n_shared_experts", NUMBER, 0) * values["d_ff"],
        "expert_scale": float(fields.get("routed_scaling_factor", POSITIVE)),
    }


def _check_groups(fields: Fields, values: dict[str, Any]) -> None:
    """Raises InputError unless a token's groups of experts have enough experts."""
    experts, groups, kept = (values[field] for field in ("num_experts", *_GROUPS))
    used = values["experts_per_token"]
    if used > experts:
        key = _MIXTURE_KEYS["experts_per_token"]
        raise fields.error(key, f"at most {_MIXTURE_KEYS['num_experts']}={experts}", used)
    if experts % groups:
        raise fields.error(_GROUPS["expert_groups"], f"a divisor of {experts} experts", groups)
    if kept > groups or experts // groups * kept < used:
        expected = f"at most {groups} groups, with {used} experts or more"
        raise fields.error(_GROUPS["groups_per_token"], expected, kept)


def _layer_kinds(fields: Fields, num_layers: int) -> list[str]:
    """Returns for each layer whether it is dense or sparse."""
    check_layers(fields, num_layers)
    count = min(fields.get("first_k_dense_replace", NUMBER), num_layers)
    first_dense = [_DENSE] * count + [_SPARSE] * (num_layers - count)
    kinds = fields.get("mlp_layer_types", LIST, first_dense)
    if len(kinds) != num_layers or not all(kind in (_DENSE, _SPARSE) for kind in kinds):
        expected = f'{num_layers} of "{_DENSE}" and "{_SPARSE}"'
        raise fields.error("mlp_layer_types", expected, kinds)
    return kinds


def _write_mixture(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    changes = config.changes or ((),)
    wide = next((dict(change).get("d_ff") for change in changes if change), config.d_ff)
    first = next((layer for layer, change in enumerate(changes) if not change), len(changes))
    return raw | {
        "intermediate_size": wide,
        "n_shared_experts": config.shared_d_ff // config.d_ff,
        "routed_scaling_factor": config.expert_scale,
        "first_k_dense_replace": first,
        "attention_bias": config.biases != "none",
        "num_nextn_predict_layers": 0,
        # Which transformers does not read, and other tools need.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }


def _read_glm(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    return _read_mixture(fields, values) | {
        "qk_norm": fields.get("use_qk_norm", FLAG),
        "biases": "qkv" if fields.get("attention_bias", FLAG) else "none",
    }


def _write_glm(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    return _write_mixture(config, raw) | {"use_qk_norm": config.qk_norm}


def _read_latent(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Config` for latent attention and mixtures."""
    heads, rotary = values["num_heads"], values["head_dim"]
    # Keys and values of each head are made of the latent, so there are as many.
    fields.only("num_key_value_heads", COUNT, heads)
    width = rotary + fields.get("qk_nope_head_dim", COUNT)
    return _read_mixture(fields, values) | {
        "head_dim": width,
        "num_kv_heads": 1,
        "rotary_dim": rotary,
        "rope_interleaved": fields.get("rope_interleave", FLAG),
        "query_rank": fields.get("q_lora_rank", COUNT, 0),
        "latent_rank": fields.get("kv_lora_rank", COUNT),
        "value_dim": fields.get("v_head_dim", COUNT),
        "query_scale": _query_scale(fields, values["rope_scaling"], width),
        "biases": "attention" if fields.get("attention_bias", FLAG) else "none",
    }


def _query_scale(fields: Fields, scaling: tuple, width: int) -> float:
    """Returns `Config.query_scale`, which YaRN raises by the square of a factor of its own."""
    rope = fields.get("rope_scaling", OBJECT, {}) or fields.get("rope_parameters", OBJECT, {})
    scale = Fields(fields.path, rope, "rope_scaling").get("mscale_all_dim", rope_json.SCALE, 0)
    if not scale or not scaling:
        return 0.0
    if scaling[0] != "yarn":
        raise fields.error("rope_scaling", '"yarn" beside mscale_all_dim', scaling[0])
    return width**-0.5 * rope_json.yarn_attention(scaling[1], scale) ** 2


def _write_latent(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    raw = {key: value for key, value in raw.items() if key != rope_json.PARTIAL}
    raw = _write_mixture(config, raw) | {
        "num_key_value_heads": config.num_heads,
        "qk_nope_head_dim": config.head_dim - config.rotary_dim,
        "qk_rope_head_dim": config.rotary_dim,
        "v_head_dim": config.value_dim,
        "q_lora_rank": config.query_rank or None,
        "kv_lora_rank": config.latent_rank,
        "rope_interleave": config.rope_interleaved,
    }
    kind, factor, *numbers = config.rope_scaling or ("default", 1.0)
    if config.query_scale and kind == "yarn" and factor > 1:
        # The numbers that `_query_scale` and the factor of cosine and sine were computed from.
        whole = (config.query_scale * config.head_dim**0.5) ** 0.5
        scales = {"mscale": numbers[3] * whole, "mscale_all_dim": whole}
        unit = 0.1 * math.log(factor)
        raw["rope_scaling"] |= {key: round((scales[key] - 1) / unit, 9) for key in scales}
    return raw


def _write_lite(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    changes = config.changes or ((),) * config.num_layers
    return _write_latent(config, raw) | {
        "mlp_layer_types": [_DENSE if change else _SPARSE for change in changes]
    }


def _head_rows(config: Config) -> dict[str, HeadRows]:
    """Returns the rows of each head in the tensor that has its keys' and its values' matrix."""
    keys, values = config.head_dim - config.rotary_dim, config.value_dim
    return {
        "attention.key_up": HeadRows(0, keys, keys + values, transposed=False),
        "attention.value_up": HeadRows(keys, values, keys + values, transposed=True),
    }


def _latent(architecture: str, defaults: dict[str, Any], write, layout: str = "") -> Family:
    return Family(
        architecture,
        {"mixer": "latent", "router": "sigmoid", "layout": layout},
        layer_names=_LATENT_LAYER | _MIXTURE_LAYER,
        keys=_LATENT_KEYS,
        defaults=_DEFAULTS
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_interleave": True}
        | defaults,
        predictor=_PREDICTOR,
        head_rows=_head_rows,
        varying=("biases",),
        read=_read_latent,
        write=write,
    )


FAMILIES = {
    "deepseek_v3": _latent(
        "DeepseekV3ForCausalLM",
        {
            "intermediate_size": 18_432,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        _write_latent,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {"router": "sigmoid"},
        layer_names=LAYER | QK_NORMS | _MIXTURE_LAYER,
        keys=_MIXTURE_KEYS,
        defaults=_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "intermediate_size": 10_944,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
        },
        predictor=_PREDICTOR,
        varying=("biases", "qk_norm"),
        read=_read_glm,
        write=_write_glm,
    ),
    "glm4_moe_lite": _latent(
        "Glm4MoeLiteForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "intermediate_size": 10_240,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
        _write_lite,
        # Nothing else tells it from DeepSeek-V3.
        layout="glm4_moe_lite",
    ),
}
