"""Description of a model family in the Hugging Face layout, and names that many families share."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from spsjax.models.config import Config
from spsjax.models.hf.fields import Fields
from spsjax.models.hf.head_rows import HeadRows
from spsjax.models.hf.locations import Part

# Keys of config.json, by field of `Config`.
KEYS = {
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
LAYER = {
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
OTHER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
# Names in files that were saved without the language-modelling head.
BARE = {name: f"model.{name}" for name in ("embed_tokens.", "layers.", "norm.")}
QK_NORMS = {
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
# Names of the modules of a mixture.
EXPERTS = {
    "ffn.router": "mlp.gate",
    "ffn.experts_gate": "mlp.experts.{expert}.gate_proj.weight",
    "ffn.experts_up": "mlp.experts.{expert}.up_proj.weight",
    "ffn.experts_down": "mlp.experts.{expert}.down_proj.weight",
}
# GELU, by the key and with the name of Gemma 2 and later.
TANH: dict[str, Any] = {"activation_key": "hidden_activation", "activation": "gelu_pytorch_tanh"}
MOST_LAYERS = 1024  # of a model whose layers differ
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}


class Wrapper(NamedTuple):
    """Multimodal model whose config.json contains the config of a language model.

    Attributes:
        model_type: `model_type` of the multimodal model.
        key: key of the language model's config.
    """

    model_type: str
    key: str


def _no_fields(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    return {}


def _no_keys(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    return raw


def _no_parts(layer: Config) -> dict[str, Part]:
    return {}


def _no_rows(config: Config) -> dict[str, HeadRows]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """Model family in the Hugging Face layout.

    A family with keys that tables cannot describe has `read` and `write`. A key of config.json that
    other families refuse, as `attention_bias`, is theirs if `defaults` has it.

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
        head_rows: function of a config that returns modules with a matrix per head which share the
            rows of a tensor, with their rows.
        ignored: regular expression for names of tensors that are not loaded.
        predictor: names of tensors of which a layer of a drafter behind the last one has some. It
            is not loaded, and is no layer that config.json leaves out; (): there are none.
        aliases: other beginnings of tensor names, and the beginnings that replace them.
        defaults: values of keys that are missing in config.json. The family ignores keys in
            `FEATURES` that are not listed here.
        full_attention_every: every n-th layer uses full attention, if config.json has no
            `layer_types`. 0: all layers are alike.
        nested_in: multimodal model whose config.json contains this one.
        ffn_ratio: d_ff / d_model, if config.json leaves d_ff out.
        varying: flags in which members differ, so that they do not identify the family;
            "num_experts": some members are mixtures.
        read: function of config.json and of the fields of `Config` that were read by the tables. It
            returns further fields.
        write: function of the config and a config.json that returns the latter with the keys that
            `read` takes.
        parts: function of a layer's own config that returns the tensors of parameters which the
            tables do not locate, by name here.
        alternatives: what `parts` returns, for folders that have these tensors in place of others.
    """

    architecture: str
    flags: dict[str, Any]
    layer_names: dict[str, str] = dataclasses.field(default_factory=lambda: LAYER)
    other_names: dict[str, str] = dataclasses.field(default_factory=lambda: OTHER)
    layer_prefix: str = "model.layers.{layer}."
    keys: dict[str, str] = dataclasses.field(default_factory=lambda: KEYS)
    activation_key: str = "hidden_act"
    activation: str = "silu"
    activation_aliases: tuple[str, ...] = ()
    transposed: bool = True
    packed: tuple[str, ...] = ()
    head_rows: Callable[[Config], dict[str, HeadRows]] = _no_rows
    ignored: str = r".*\.rotary_emb\.inv_freq|mtp\..*"  # `mtp` is a drafter's (`drafters.mtp`)
    predictor: tuple[str, ...] = ()
    aliases: dict[str, str] = dataclasses.field(default_factory=lambda: BARE)
    defaults: dict[str, Any] = dataclasses.field(default_factory=lambda: DEFAULTS)
    full_attention_every: int = 0
    nested_in: Wrapper | None = None
    ffn_ratio: int = 0
    varying: tuple[str, ...] = ()
    read: Callable[[Fields, dict[str, Any]], dict[str, Any]] = _no_fields
    write: Callable[[Config, dict[str, Any]], dict[str, Any]] = _no_keys
    parts: Callable[[Config], dict[str, Part]] = _no_parts
    alternatives: Callable[[Config], dict[str, Part]] = _no_parts

    def canonical(self, name: str) -> str:
        """Returns the name of a tensor with the family's usual beginning."""
        for alias, prefix in self.aliases.items():
            if name.startswith(alias):
                return prefix + name.removeprefix(alias)
        return name

    def further_layers(self, num_layers: int, names: Collection[str]) -> tuple[str, ...]:
        """Returns the beginnings of the names of a drafter's tensors behind the last layer."""
        layer, prefixes = num_layers, []
        while any(f"{self._prefix(layer)}{name}" in names for name in self.predictor):
            prefixes.append(self._prefix(layer))
            layer += 1
        return tuple(prefixes)

    def _prefix(self, layer: int) -> str:
        return self.layer_prefix.format(layer=layer)


def check_layers(fields: Fields, num_layers: int) -> None:
    """Raises InputError if there are too many layers for a list with an entry per layer."""
    if num_layers > MOST_LAYERS:
        raise fields.error("num_hidden_layers", f"at most {MOST_LAYERS} layers", num_layers)


def shortest_cycle(values: Sequence) -> tuple:
    """Returns the shortest sequence that gives the values when it is repeated."""
    period = next(
        size
        for size in range(1, len(values) + 1)
        if all(value == values[i % size] for i, value in enumerate(values))
    )
    return tuple(values[:period])
