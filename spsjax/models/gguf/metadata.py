"""Conversion of the metadata of GGUF files to the fields of Hugging Face's `config.json`.

The rules are those of llama.cpp, which reads each architecture with defaults of its own
(`llama-model.cpp`, `convert_hf_to_gguf.py`).
"""

from typing import Any

import gguf
import numpy as np

from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.gguf.header import Header
from spsjax.models.hf import config_json
from spsjax.models.hf.fields import COUNT, FLAG, LIST, NUMBER, POSITIVE, TEXT, TOKEN, Fields

_FLAGS = "a list of true and false", lambda x: type(x) is list and all(map(FLAG[1], x))
# `model_type` in config.json, by architecture; of a mixture of experts, too.
_TYPES = {
    "llama": ("llama", "mixtral"),  # Mistral and SmolLM2, too
    "qwen2": ("qwen2", None),
    "qwen3": ("qwen3", None),
    "qwen3moe": (None, "qwen3_moe"),
    "gemma": ("gemma", None),
    "gemma2": ("gemma2", None),
    "gemma3": ("gemma3_text", None),
}
# Keys of config.json by key of the metadata, which follows the architecture and a dot.
_REQUIRED = {
    "context_length": ("max_position_embeddings", COUNT),
    "embedding_length": ("hidden_size", COUNT),
    "block_count": ("num_hidden_layers", COUNT),
    "feed_forward_length": ("intermediate_size", COUNT),
    "attention.head_count": ("num_attention_heads", COUNT),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", POSITIVE),
}
_OPTIONAL = {
    "attention.head_count_kv": ("num_key_value_heads", COUNT),
    "attn_logit_softcapping": ("attn_logit_softcapping", POSITIVE),
    "final_logit_softcapping": ("final_logit_softcapping", POSITIVE),
    "rope.freq_base_swa": ("rope_local_base_freq", POSITIVE),
    "expert_used_count": ("num_experts_per_tok", COUNT),
    "expert_feed_forward_length": ("moe_intermediate_size", COUNT),
}
# Numbers of layers of the models whose scores are scaled by (d_model / num_heads)**-0.5.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_YARN = "beta_fast", "beta_slow"
# Ids at which a text ends: of the sequence, of a turn, and of a message to a tool.
_ENDS = "eos", "eot", "eom"
# Control tokens that end a text, too. A file often names only one of them.
_END_TEXTS = {
    *("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
    *("<end_of_turn>", "<EOT>", "_<EOT>"),
}
_CONTROL = gguf.TokenType.CONTROL.value


def read_config(header: Header) -> Config:
    """Returns the config of the model in a GGUF file.

    Raises InputError if the architecture is not supported, or if a value is missing or cannot be
    used.
    """
    fields = Fields(header.path, header.metadata)
    architecture = fields.get("general.architecture", TEXT)
    if architecture not in _TYPES:
        expected = f"one of {', '.join(_TYPES)}"
        raise fields.error("general.architecture", expected, architecture)
    values = _Values(fields, architecture)
    num_experts = values.get("expert_count", NUMBER, 0)
    name = _TYPES[architecture][bool(num_experts)]
    if name is None:
        expected = "experts" if num_experts == 0 else "no experts"
        raise fields.error(f"{architecture}.expert_count", expected, num_experts)
    raw: dict[str, Any] = {"model_type": name}
    if num_experts:
        raw["num_local_experts"] = raw["num_experts"] = num_experts
        raw["norm_topk_prob"] = True
    for key, (name, kind) in _REQUIRED.items():
        raw[name] = values.get(key, kind)
    for key, (name, kind) in _OPTIONAL.items():
        if (value := values.get(key, kind, None)) is not None:  # else the family's default
            raw[name] = value
    if raw["num_hidden_layers"] > len(header.tensors):
        expected = f"at most {len(header.tensors)}, the number of tensors,"
        raise values.error("block_count", expected, raw["num_hidden_layers"])
    experts = header.tensors.get("blk.0.ffn_gate_exps.weight")
    if num_experts and (experts is None or experts.shape[0] != num_experts):
        found = "none" if experts is None else experts.shape[0]
        raise values.error("expert_count", f"{found}, as the tensors of experts have,", num_experts)
    raw["head_dim"] = _head_dim(values, raw)
    raw |= _windows(values, architecture) | _rope(values, raw, header)
    if architecture in _SCALED_BY_WIDTH:
        by_width = raw["num_hidden_layers"] == _SCALED_BY_WIDTH[architecture]
        width = raw["hidden_size"] / raw["num_attention_heads"]
        raw["query_pre_attn_scalar"] = width if by_width else raw["head_dim"]
    if "token_embd.weight" not in header.tensors:
        raise InputError(f"{header.path}: expected a tensor token_embd.weight, found none")
    raw["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in header.tensors
    return config_json.parse(header.path, raw | _tokens(fields))


class _Values:
    """Values of the metadata of one architecture, by the part of their keys after its name."""

    def __init__(self, fields: Fields, architecture: str):
        self.fields, self.prefix = fields, f"{architecture}."

    def get(self, key: str, kind, *default):
        return self.fields.get(self.prefix + key, kind, *default)

    def only(self, key: str, kind, supported) -> None:
        self.fields.only(self.prefix + key, kind, supported)

    def error(self, key: str, expected: str, value) -> InputError:
        return self.fields.error(self.prefix + key, expected, value)


def _head_dim(values: _Values, raw: dict) -> int:
    """Returns the width of a head; raises InputError if queries and values differ in it."""
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    size = values.get("attention.key_length", COUNT, None)
    if size is None and width % heads:
        raise values.error("embedding_length", f"a multiple of {heads} heads", width)
    size = size or width // heads
    values.only("attention.value_length", COUNT, size)
    values.only("rope.dimension_count", COUNT, size)
    return size


def _windows(values: _Values, architecture: str) -> dict[str, object]:
    """Returns the keys of windows; llama.cpp has them in Gemma 2 and 3 alone of these."""
    if architecture not in ("gemma2", "gemma3"):
        return {}
    default = 4096 if architecture == "gemma2" else None
    keys: dict[str, object] = {}
    keys["sliding_window"] = values.get("attention.sliding_window", NUMBER, default) or None
    key = "attention.sliding_window_pattern"
    if isinstance(values.fields.raw.get(values.prefix + key), list):
        kinds = "full_attention", "sliding_attention"
        keys["layer_types"] = [kinds[local] for local in values.get(key, _FLAGS)]
    elif architecture == "gemma3":
        keys["sliding_window_pattern"] = values.get(key, COUNT, 6)
    return keys


def _rope(values: _Values, raw: dict, header: Header) -> dict[str, object]:
    """Returns the keys of rotary positions."""
    keys: dict[str, object] = {"rope_theta": values.get("rope.freq_base", POSITIVE, 10_000.0)}
    kind = values.get("rope.scaling.type", TEXT, "none")
    factor = values.get("rope.scale_linear", POSITIVE, 1.0)  # in older files
    factor = values.get("rope.scaling.factor", POSITIVE, factor)
    if kind not in ("none", "linear", "yarn"):
        raise values.error("rope.scaling.type", '"none", "linear" or "yarn"', kind)
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        values.only(f"rope.scaling.{key}", POSITIVE, 1.0)
    values.only("rope.scaling.yarn_log_multiplier", NUMBER, 0)
    scaling: dict[str, object] = {}
    original = values.get("rope.scaling.original_context_length", COUNT, None)
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = original
        more = {name: values.get(f"rope.scaling.yarn_{name}", POSITIVE, None) for name in _YARN}
        scaling |= {name: value for name, value in more.items() if value is not None}
    elif factor != 1.0 and (kind == "linear" or "rope.scaling.type" not in values.fields.raw):
        scaling = {"rope_type": "linear", "factor": factor}
    if "rope_freqs.weight" in header.tensors:
        if scaling:
            raise values.error("rope.scaling.type", "none beside the tensor rope_freqs", kind)
        scaling = _divided(header, raw)
    return keys | ({"rope_scaling": scaling} if scaling else {})


def _divided(header: Header, raw: dict) -> dict[str, object]:
    """Returns a scaling that divides each frequency by a number, of a tensor in the file.

    Llama 3.1 has this tensor. LongRoPE with equal lists is the scaling with any such numbers.
    """
    tensor, size = header.tensors["rope_freqs.weight"], raw["head_dim"] // 2
    if tensor.shape != (size,) or tensor.type != gguf.GGMLQuantizationType.F32:
        raise InputError(
            f"{header.path}: rope_freqs.weight: expected {size} numbers of type F32, found "
            f"shape {list(tensor.shape)} of {tensor.type.name}"
        )
    factors = tensor.data.view(np.float32).tolist()
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
    }


def _tokens(fields: Fields) -> dict[str, object]:
    """Returns the keys of the beginning- and end-of-sequence ids."""
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id", TOKEN, None) for name in _ENDS]
    tokens = fields.get("tokenizer.ggml.tokens", LIST, [])
    types = fields.get("tokenizer.ggml.token_type", LIST, [])
    for id, (text, type_) in enumerate(zip(tokens, types)):
        if type_ == _CONTROL and text in _END_TEXTS:
            ends.append(id)
    return {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id", TOKEN, None),
        "eos_token_id": list(dict.fromkeys(id for id in ends if id is not None)),
    }
