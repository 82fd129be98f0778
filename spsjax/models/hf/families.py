"""Model families in the Hugging Face layout: flags, defaults and tensor names.

This module is data. `weights` reads and writes tensors by it, and `config_json` reads and writes
config.json.
"""

import dataclasses
from typing import Any, NamedTuple

from spsjax.models.config import Config

# Keys of config.json, by field of `Config`.
_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
# Names of a layer's modules in the layout, by name here. A module's tensors end in `.weight` and
# `.bias`. A parameter with an entry of its own is stored under exactly that name. `{expert}` stands
# for the number of an expert.
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_OTHER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
# Names in files that were saved without the language-modelling head.
_BARE = {name: f"model.{name}" for name in ("embed_tokens.", "layers.", "norm.")}
_QK_NORMS = {
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}
_POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


class Wrapper(NamedTuple):
    """Multimodal model whose config.json contains the config of a language model.

    Attributes:
        model_type: `model_type` of the multimodal model.
        key: key of the language model's config.
    """

    model_type: str
    key: str


@dataclasses.dataclass(frozen=True)
class Family:
    """Model family in the Hugging Face layout.

    Attributes:
        architecture: name of the class in config.json.
        flags: fields of `Config` that all members share. Other flags have the defaults of `Config`.
        layer_names: names of a layer's modules in the layout, by name here.
        other_names: names of the other modules in the layout, by name here.
        layer_prefix: common beginning of a layer's tensor names.
        keys: keys of config.json, by field of `Config`.
        activation_key: key of the activation in config.json.
        activation: name of the activation in written files.
        activation_aliases: other names that mean the same activation in this family.
        transposed: whether linear weights are stored as [out, in]. The head always is.
        packed: modules whose weights are concatenated in one tensor, in this order.
        ignored: regular expression for names of tensors that are not loaded.
        aliases: other beginnings of tensor names, and the beginnings that replace them.
        defaults: values of keys that are missing in config.json. The family ignores keys in
            `FEATURES` that are not listed here.
        full_attention_every: every n-th layer uses full attention, if config.json has no
            `layer_types`. 0: all layers are alike.
        nested_in: multimodal model whose config.json contains this one.
        ffn_ratio: d_ff / d_model, if config.json leaves d_ff out.
    """

    architecture: str
    flags: dict[str, Any]
    layer_names: dict[str, str] = dataclasses.field(default_factory=lambda: _LAYER)
    other_names: dict[str, str] = dataclasses.field(default_factory=lambda: _OTHER)
    layer_prefix: str = "model.layers.{layer}."
    keys: dict[str, str] = dataclasses.field(default_factory=lambda: _KEYS)
    activation_key: str = "hidden_act"
    activation: str = "silu"
    activation_aliases: tuple[str, ...] = ()
    transposed: bool = True
    packed: tuple[str, ...] = ()
    ignored: str = r".*\.rotary_emb\.inv_freq"
    aliases: dict[str, str] = dataclasses.field(default_factory=lambda: _BARE)
    defaults: dict[str, Any] = dataclasses.field(default_factory=lambda: _DEFAULTS)
    full_attention_every: int = 0
    nested_in: Wrapper | None = None
    ffn_ratio: int = 0

    def canonical(self, name: str) -> str:
        """Returns the name of a tensor with the family's usual beginning."""
        for alias, prefix in self.aliases.items():
            if name.startswith(alias):
                return prefix + name.removeprefix(alias)
        return name


_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_WINDOWS = {"sliding_window": 4096}
_LAST_WINDOWS = _WINDOWS | {
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {"ffn": "geglu", "norm_offset": 1.0, "embed_scale": True}
_GEMMA_DEFAULTS = _DEFAULTS | {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | _WINDOWS | {"query_pre_attn_scalar": 256, "layer_types": None}
_TANH: dict[str, Any] = {"activation_key": "hidden_activation", "activation": "gelu_pytorch_tanh"}

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
        "MistralForCausalLM", {}, defaults=_DEFAULTS | _WINDOWS | {"layer_types": None}
    ),
    "qwen2": Family("Qwen2ForCausalLM", {"biases": "qkv"}, defaults=_DEFAULTS | _LAST_WINDOWS),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        layer_names=_LAYER | _QK_NORMS,
        defaults=_DEFAULTS | _LAST_WINDOWS | {"head_dim": 128},
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
        layer_names=_LAYER | _POST_NORMS,
        **_TANH,
        defaults=_GEMMA2_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        full_attention_every=2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA, "post_norms": True, "qk_norm": True},
        layer_names=_LAYER | _QK_NORMS | _POST_NORMS,
        **_TANH,
        # Sizes from 4B on are multimodal. Only their language model is read.
        ignored=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
        aliases=_BARE
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
        layer_names=_LAYER
        | {
            "ffn.router": "block_sparse_moe.gate",
            "ffn.experts_gate": "block_sparse_moe.experts.{expert}.w1.weight",
            "ffn.experts_up": "block_sparse_moe.experts.{expert}.w3.weight",
            "ffn.experts_down": "block_sparse_moe.experts.{expert}.w2.weight",
        },
        keys=_KEYS
        | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        defaults=_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        layer_names=_LAYER
        | _QK_NORMS
        | {
            "ffn.router": "mlp.gate",
            "ffn.experts_gate": "mlp.experts.{expert}.gate_proj.weight",
            "ffn.experts_up": "mlp.experts.{expert}.up_proj.weight",
            "ffn.experts_down": "mlp.experts.{expert}.down_proj.weight",
        },
        keys=_KEYS
        | {
            "d_ff": "moe_intermediate_size",
            "num_experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "renormalize": "norm_topk_prob",
        },
        defaults=_DEFAULTS
        | {"norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096},
    ),
    "chinchilla": Family(
        "ChinchillaForCausalLM",
        {"positions": "relative", "ffn": "gelu"},
        layer_names=_LAYER
        | {
            "attention.position": "self_attn.r_proj",
            "attention.content_bias": "self_attn.content_bias",
            "attention.position_bias": "self_attn.position_bias",
        },
        activation="gelu_pytorch_tanh",
    ),
}


@dataclasses.dataclass(frozen=True)
class TensorLocation:
    """Location of one parameter in the tensors of the layout.

    Attributes:
        names: names of the tensors: one, or one per expert.
        stacked: whether there is one tensor per index of the parameter's first axis.
        transposed: whether the tensors have the parameter's last two axes swapped.
        part: index of this parameter among those that share the tensor's last axis.
        num_parts: number of parameters of equal size that share the tensor's last axis.
    """

    names: tuple[str, ...]
    stacked: bool
    transposed: bool
    part: int = 0
    num_parts: int = 1


def locate(family: str, config: Config, path: tuple) -> TensorLocation:
    """Returns the location of the parameter at `path`, as ('layers', 0, 'ffn', 'up', 'kernel')."""
    known = FAMILIES[family]
    in_layer = path[0] == "layers"
    names = known.layer_names if in_layer else known.other_names
    local = path[2:] if in_layer else path
    full_name, module = ".".join(local), ".".join(local[:-1])
    is_matrix = path[-1] == "kernel" or full_name.startswith("ffn.experts_")
    if full_name in names:
        name = names[full_name]
    else:
        name = f"{names[module]}.{'bias' if path[-1] == 'bias' else 'weight'}"
    if in_layer:
        name = known.layer_prefix.format(layer=path[1]) + name
    stacked = "{expert}" in name
    experts = range(config.num_experts if stacked else 1)
    is_packed = module in known.packed
    return TensorLocation(
        names=tuple(name.replace("{expert}", str(expert)) for expert in experts),
        stacked=stacked,
        transposed=is_matrix and (known.transposed or module == "head"),
        part=known.packed.index(module) if is_packed else 0,
        num_parts=len(known.packed) if is_packed else 1,
    )
