"""Families of models in the Hugging Face layout: their flags, and the names that they give things.

All of it is data: what reads and writes it is in `huggingface` and `config_json`.
"""

import dataclasses

from spsjax.models.config import Config

# Field of `Config` -> key of config.json.
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
# Module -> what the layout calls it: those of a layer, then the others. One that is a tensor itself
# has its own name, without `.weight` or `.bias`; `{expert}` stands for a number.
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
_OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
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


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        architecture: as config.json names the class.
        flags: fields of `Config` that all members share; other flags have their defaults.
        layer, outside: names of modules, see above.
        prefix: of a layer's names.
        keys: of config.json, by field.
        activation: its key and its names there; the first is written.
        transposed: whether linear weights are stored [out, in]; the head always is.
        packed: modules whose outputs lie side by side in one tensor, in this order.
        ignored: regular expression of the names of tensors that hold nothing to load.
        prefixes: how names begin in some files, and how here.
        absent: what config.json means where it leaves a key out. Of `FEATURES`, other keys than
            these mean nothing to the family.
        period: of so many layers, the last one sees all, where config.json does not say which.
        inside: the `model_type` of a larger model, and where its config.json has this one's.
        widening: d_ff over d_model, where config.json leaves d_ff out.
    """

    architecture: str
    flags: dict[str, object]
    layer: dict[str, str] = dataclasses.field(default_factory=lambda: _LAYER)
    outside: dict[str, str] = dataclasses.field(default_factory=lambda: _OUTSIDE)
    prefix: str = "model.layers.{layer}."
    keys: dict[str, str] = dataclasses.field(default_factory=lambda: _KEYS)
    activation: tuple[str, ...] = ("hidden_act", "silu")
    transposed: bool = True
    packed: tuple[str, ...] = ()
    ignored: str = r".*\.rotary_emb\.inv_freq"
    prefixes: dict[str, str] = dataclasses.field(default_factory=lambda: _BARE)
    absent: dict[str, object] = dataclasses.field(default_factory=lambda: _ABSENT)
    period: int = 0
    inside: tuple[str, ...] = ()
    widening: int = 0

    def canonical(self, name: str) -> str:
        """A tensor's name as it is here."""
        for prefix, ours in self.prefixes.items():
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return name


_ABSENT = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_WINDOWS = {"sliding_window": 4096}
_LAST_WINDOWS = _WINDOWS | {
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {"ffn": "geglu", "norm_offset": 1.0, "embed_scale": True}
_GEMMA_ABSENT = _ABSENT | {"tie_word_embeddings": True, "head_dim": 256}
_SCALED = _GEMMA_ABSENT | _WINDOWS | {"query_pre_attn_scalar": 256, "layer_types": None}
_TANH = ("hidden_activation", "gelu_pytorch_tanh")

# Keys that some families know and others ignore, whatever is there.
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

# By `model_type`. Only this package reads "chinchilla": no layout of other tools has its positions.
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"positions": "learned", "ffn": "gelu", "norm": "layer", "biases": "all"},
        layer={
            "attention_norm": "ln_1",
            "attention.query": "attn.c_attn",
            "attention.key": "attn.c_attn",
            "attention.value": "attn.c_attn",
            "attention.out": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn.up": "mlp.c_fc",
            "ffn.down": "mlp.c_proj",
        },
        outside={
            "embed": "transformer.wte",
            "position_embed": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        prefix="transformer.h.{layer}.",
        keys={
            "vocab_size": "vocab_size",
            "d_model": "n_embd",
            "d_ff": "n_inner",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon",
        },
        activation=("activation_function", "gelu_new", "gelu_pytorch_tanh"),
        transposed=False,
        packed=("attention.query", "attention.key", "attention.value"),
        ignored=r".*\.attn\.(masked_)?bias",
        prefixes={name: f"transformer.{name}" for name in ("wte.", "wpe.", "h.", "ln_f.")},
        absent={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        widening=4,
    ),
    "llama": Family("LlamaForCausalLM", {}),
    "mistral": Family("MistralForCausalLM", {}, absent=_ABSENT | _WINDOWS | {"layer_types": None}),
    "qwen2": Family("Qwen2ForCausalLM", {"biases": "qkv"}, absent=_ABSENT | _LAST_WINDOWS),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        layer=_LAYER | _QK_NORMS,
        absent=_ABSENT | _LAST_WINDOWS | {"head_dim": 128},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA,
        # Released files say "gelu", and mean tanh's.
        activation=("hidden_act", "gelu_pytorch_tanh", "gelu"),
        absent=_GEMMA_ABSENT,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**_GEMMA, "post_norms": True},
        layer=_LAYER | _POST_NORMS,
        activation=_TANH,
        absent=_SCALED | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        period=2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA, "post_norms": True, "qk_norm": True},
        layer=_LAYER | _QK_NORMS | _POST_NORMS,
        activation=_TANH,
        # Of the larger ones, which also see pictures, the language model alone is read.
        ignored=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
        prefixes=_BARE
        | {
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
        },
        absent=_SCALED
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
        period=6,
        inside=("gemma3", "text_config"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"renormalize": True},
        layer=_LAYER
        | {
            "ffn.router": "block_sparse_moe.gate",
            "ffn.experts_gate": "block_sparse_moe.experts.{expert}.w1.weight",
            "ffn.experts_up": "block_sparse_moe.experts.{expert}.w3.weight",
            "ffn.experts_down": "block_sparse_moe.experts.{expert}.w2.weight",
        },
        keys=_KEYS
        | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        absent=_ABSENT
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        layer=_LAYER
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
        absent=_ABSENT
        | {"norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096},
    ),
    "chinchilla": Family(
        "ChinchillaForCausalLM",
        {"positions": "relative", "ffn": "gelu"},
        layer=_LAYER
        | {
            "attention.position": "self_attn.r_proj",
            "attention.content_bias": "self_attn.content_bias",
            "attention.position_bias": "self_attn.position_bias",
        },
        activation=("hidden_act", "gelu_pytorch_tanh"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter is stored.

    Attributes:
        names: of its tensor, or of one for each index of its first axis.
        stacked: whether it is the latter.
        transposed: whether its last two axes are swapped there.
        part: (index, count): which of so many equal parts of the last axis it is there.
    """

    names: tuple[str, ...]
    stacked: bool
    transposed: bool
    part: tuple[int, int] = (0, 1)


def place(family: str, config: Config, path: tuple) -> Place:
    """The place of the parameter at `path`, such as ('layers', 0, 'ffn', 'up', 'kernel')."""
    known = FAMILIES[family]
    inside = path[0] == "layers"
    names = known.layer if inside else known.outside
    whole, module = (".".join(path[2 * inside : end]) for end in (len(path), -1))
    is_matrix = path[-1] == "kernel" or whole.startswith("ffn.experts_")
    if whole in names:
        name = names[whole]
    else:
        name = f"{names[module]}.{'bias' if path[-1] == 'bias' else 'weight'}"
    if inside:
        name = known.prefix.format(layer=path[1]) + name
    stacked, part = "{expert}" in name, (0, 1)
    numbers = range(config.num_experts if stacked else 1)
    if module in known.packed:
        part = known.packed.index(module), len(known.packed)
    return Place(
        tuple(name.replace("{expert}", str(number)) for number in numbers),
        stacked,
        is_matrix and (known.transposed or module == "head"),
        part,
    )
