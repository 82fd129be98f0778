"""Model families in the Hugging Face layout: flags, defaults and tensor names.

This module is data. `weights` reads and writes tensors by it, and `config_json` reads and writes
config.json. Families with keys or tensors of a kind of their own have a module each.
"""

from collections.abc import Container

from spsjax.models.config import Config
from spsjax.models.hf import deepseek, gemma4, qwen_hybrids
from spsjax.models.hf.family import (
    BARE,
    DEFAULTS,
    EXPERTS,
    KEYS,
    LAYER,
    POST_NORMS,
    QK_NORMS,
    TANH,
    Family,
    Wrapper,
)
from spsjax.models.hf.locations import Part, TensorLocation

_WINDOWS = {"sliding_window": 4096}
_LAST_WINDOWS = _WINDOWS | {
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {"ffn": "geglu", "norm_offset": 1.0, "embed_scale": True}
_GEMMA_DEFAULTS = DEFAULTS | {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | _WINDOWS | {"query_pre_attn_scalar": 256, "layer_types": None}

# Keys that some families use and others ignore, whatever their value.
FEATURES = (
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "layer_types",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)

# Families by `model_type`. "chinchilla" is of this package alone, because transformers has no model
# with its relative positions.
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"positions": "learned", "ffn": "gelu", "norm": "layer", "biases": "all"},
        layer_names={
            "attention_norm": "ln_1",
            "attention.query": "attn.c_attn",
            "attention.key": "attn.c_attn",
            "attention.value": "attn.c_attn",
            "attention.out": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn.up": "mlp.c_fc",
            "ffn.down": "mlp.c_proj",
        },
        other_names={
            "embed": "transformer.wte",
            "position_embed": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        layer_prefix="transformer.h.{layer}.",
        keys={
            "vocab_size": "vocab_size",
            "d_model": "n_embd",
            "d_ff": "n_inner",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon",
        },
        activation_key="activation_function",
        activation="gelu_new",
        activation_aliases=("gelu_pytorch_tanh",),
        transposed=False,
        packed=("attention.query", "attention.key", "attention.value"),
        ignored=r".*\.attn\.(masked_)?bias",
        aliases={name: f"transformer.{name}" for name in ("wte.", "wpe.", "h.", "ln_f.")},
        defaults={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        ffn_ratio=4,
    ),
    "llama": Family("LlamaForCausalLM", {}),
    "mistral": Family(
        "MistralForCausalLM", {}, defaults=DEFAULTS | _WINDOWS | {"layer_types": None}
    ),
    "qwen2": Family("Qwen2ForCausalLM", {"biases": "qkv"}, defaults=DEFAULTS | _LAST_WINDOWS),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        layer_names=LAYER | QK_NORMS,
        defaults=DEFAULTS | _LAST_WINDOWS | {"head_dim": 128},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA,
        activation="gelu_pytorch_tanh",
        activation_aliases=("gelu",),  # in released files, which mean the approximation by tanh
        defaults=_GEMMA_DEFAULTS,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**_GEMMA, "post_norms": True},
        layer_names=LAYER | POST_NORMS,
        **TANH,
        defaults=_GEMMA2_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        full_attention_every=2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA, "post_norms": True, "qk_norm": True},
        layer_names=LAYER | QK_NORMS | POST_NORMS,
        **TANH,
        # Sizes from 4B on are multimodal. Only their language model is read.
        ignored=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
        aliases=BARE
        | {
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
        },
        defaults=_GEMMA2_DEFAULTS
        | {
            "sliding_window_pattern": None,
            "final_logit_softcapping": None,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10_000.0,
        },
        full_attention_every=6,
        nested_in=Wrapper("gemma3", "text_config"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"renormalize": True},
        layer_names=LAYER
        | {
            "ffn.router": "block_sparse_moe.gate",
            "ffn.experts_gate": "block_sparse_moe.experts.{expert}.w1.weight",
            "ffn.experts_up": "block_sparse_moe.experts.{expert}.w3.weight",
            "ffn.experts_down": "block_sparse_moe.experts.{expert}.w2.weight",
        },
        keys=KEYS
        | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        defaults=DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        layer_names=LAYER | QK_NORMS | EXPERTS,
        keys=KEYS
        | {
            "d_ff": "moe_intermediate_size",
            "num_experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "renormalize": "norm_topk_prob",
        },
        defaults=DEFAULTS
        | {"norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096},
    ),
    "chinchilla": Family(
        "ChinchillaForCausalLM",
        {"positions": "relative", "ffn": "gelu"},
        layer_names=LAYER
        | {
            "attention.position": "self_attn.r_proj",
            "attention.content_bias": "self_attn.content_bias",
            "attention.position_bias": "self_attn.position_bias",
        },
        activation="gelu_pytorch_tanh",
    ),
    **qwen_hybrids.FAMILIES,
    **deepseek.FAMILIES,
    **gemma4.FAMILIES,
}


def locate(family: str, config: Config, path: tuple, stored: Container[str] = ()) -> TensorLocation:
    """Returns the location of the parameter at `path`, as ('layers', 0, 'ffn', 'up', 'kernel').

    `stored` are the names of a folder's tensors, for families with `Family.alternatives`.
    """
    known = FAMILIES[family]
    in_layer = path[0] == "layers"
    names = known.layer_names if in_layer else known.other_names
    local = path[2:] if in_layer else path
    full_name, module = ".".join(local), ".".join(local[:-1])
    is_matrix = path[-1] == "kernel" or full_name.startswith("ffn.experts_")
    prefix = known.layer_prefix.format(layer=path[1]) if in_layer else ""
    if in_layer and (part := _part(known, config.layer(path[1]), full_name, prefix, stored)):
        return TensorLocation(
            names=(prefix + part.tensor,),
            stacked=False,
            transposed=part.is_filter or (is_matrix and known.transposed),
            part=part.index,
            sizes=part.sizes,
            is_filter=part.is_filter,
        )
    if full_name in names:
        name = prefix + names[full_name]
    else:
        name = f"{prefix}{names[module]}.{'bias' if path[-1] == 'bias' else 'weight'}"
    stacked = "{expert}" in name
    experts = range(config.layer(path[1]).num_experts if stacked else 1)
    is_packed = module in known.packed
    return TensorLocation(
        names=tuple(name.replace("{expert}", str(expert)) for expert in experts),
        stacked=stacked,
        transposed=is_matrix and (known.transposed or module == "head"),
        part=known.packed.index(module) if is_packed else 0,
        num_parts=len(known.packed) if is_packed else 1,
        rows=known.head_rows(config).get(module),
    )


def _part(
    family: Family, layer: Config, name: str, prefix: str, stored: Container[str]
) -> Part | None:
    """Returns the part of a tensor that a layer's parameter has; None: the tables locate it."""
    other = family.alternatives(layer).get(name)
    if other is not None and prefix + other.tensor in stored:
        return other
    return family.parts(layer).get(name)
