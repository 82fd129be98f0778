"""Configs of decoders, with every flag in which model families differ."""

import dataclasses
import functools
import sys
from typing import Any

from spsjax.errors import InputError, short_repr
from spsjax.models import config_checks, weight_counts

_CHOICES = {
    "positions": ("rotary", "relative", "learned"),
    "ffn": ("swiglu", "geglu", "gelu"),
    "norm": ("rms", "layer"),
    "biases": ("none", "qkv", "attention", "all"),
    "mixer": ("attention", "latent", "delta", "shared"),
    "router": ("softmax", "sigmoid", "scaled"),
}
# Fields that all layers share, and the window, which `windows` gives.
_OF_MODEL = (
    "vocab_size",
    "d_model",
    "num_layers",
    "max_positions",
    "padded_vocab_size",
    "positions",
    "windows",
    "changes",
    "recent",
    "sinks",
    "logit_softcap",
    "embed_scale",
    "layer_inputs",
    "layer_input_rows",
    "tie_embeddings",
    "bos_id",
    "eos_ids",
    "layout",
)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Sub-layers that a pass skips, so that the residual stream passes them unchanged.

    Attributes:
        attention: layers whose attention is skipped, in ascending order.
        ffn: layers whose feed-forward network is skipped, in ascending order.
    """

    attention: tuple[int, ...] = ()
    ffn: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """First layer with a skipped sub-layer."""
        return min((*self.attention, *self.ffn), default=sys.maxsize)

    @classmethod
    def after(cls, num_kept: int, num_layers: int) -> "Skipped":
        """Returns an early exit: it skips all sub-layers after the first `num_kept` layers."""
        layers = tuple(range(num_kept, num_layers))
        return cls(layers, layers)

    def check(self, config: "Config") -> None:
        """Raises InputError unless these are distinct layers of the model in ascending order."""
        for name in ("attention", "ffn"):
            layers = getattr(self, name)
            inside = isinstance(layers, tuple) and all(
                type(layer) is int and 0 <= layer < config.num_layers for layer in layers
            )
            if not inside or layers != tuple(sorted(set(layers))):
                raise InputError(
                    f"skipped.{name}: expected layers in [0, {config.num_layers}) in rising order, "
                    f"found {short_repr(layers)}"
                )
        for layer in set(range(config.num_layers)).difference(self.attention):
            if (source := config.source(layer)) in self.attention:
                raise InputError(
                    f"skipped.attention: expected layer {layer}, too, which reads the keys of "
                    f"layer {source}, found {short_repr(self.attention)}"
                )


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a decoder. Hashable, so that it can be a static argument of `jit`.

    Attributes:
        vocab_size, d_model, d_ff, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        max_positions: longest context in tokens.
        padded_vocab_size: number of rows of embedding and head if they are padded; 0: vocab_size.
        positions: kind of positions: "rotary", "learned", or "relative" (Transformer-XL, with a
            projection per layer).
        ffn: kind of feed-forward network: "swiglu" and "geglu" with a gate, or "gelu" with two
            matrices. GELU is the tanh approximation.
        norm: kind of norm: "rms", or "layer" with a bias.
        norm_offset: constant added to a norm's scale (Gemma: 1).
        post_norms: whether the outputs of attention and feed-forward are normalised before they are
            added to the residual stream.
        qk_norm: whether queries and keys of each head are normalised before they are rotated.
        biases: linear layers with a bias: "none"; query, key and value ("qkv"); those of the
            attention ("attention"); or "all".
        rope_theta: base of the rotary frequencies.
        rotary_dim: number of entries of each head that are rotated; 0: all. They are its first
            ones, and in latent attention its last ones.
        rope_interleaved: whether entry 2i is rotated against entry 2i + 1, and not against one half
            a head later.
        rope_theta_local: base in layers with a window; 0: rope_theta.
        rope_scaling: scaling of rotary frequencies (`models.rope`); (): none. It does not apply to
            layers with a window if the model has `rope_theta_local`.
        windows: attention window per layer, repeated over the layers; it includes the token itself;
            0: no window.
        changes: fields in which a layer differs from the model's config, as (name, value) pairs per
            layer, repeated over the layers; (): all layers are alike, but for `windows`.
        mixer: how the tokens of a layer read earlier ones: "attention"; "latent"
            (`models.latent`), with one key-value head; "delta" (`models.delta`), with a state of
            fixed size; or "shared", attention to the keys and values of an earlier layer
            (`source`).
        query_rank, latent_rank: sizes of a layer with latent attention: width of the queries'
            compressed input, 0: it is not compressed; width of the compressed keys.
        value_dim: width of a head's values in layers of the kinds "latent" and "delta".
        delta_taps: number of tokens that a convolution of a gated delta net reads.
        attention_gate: whether the outputs of attention are multiplied by a sigmoid gate.
        recent: attention window of every layer, the token itself included; 0: no window.
        sinks: number of first tokens that stay visible outside of `recent`. A token attends to them
            from position sinks + recent - 1 at most (Xiao et al. 2023, arXiv 2309.17453).
        query_scale: factor of the attention scores; 0: 1 / sqrt(head_dim).
        value_norm: whether values of each head are normalised, without a learned scale.
        value_is_key: whether the projection to keys also gives the values.
        attention_softcap, logit_softcap: limit c in c tanh(x / c) for scores and logits; 0: none.
        embed_scale: whether embeddings are multiplied by sqrt(d_model).
        layer_inputs: width of a second embedding of the tokens, which each layer has of its own; 0:
            there is none.
        layer_input_rows: number of rows of the table of these embeddings; 0: `vocab_rows`.
        output_scale: whether a learned factor multiplies the output of each layer.
        num_experts: number of experts per layer; 0: one feed-forward network without a router.
        experts_per_token: number of experts per token, those with the highest router probability.
        renormalize: whether the weights of a token's experts are normalised to sum to 1.
        router: "softmax", or "sigmoid" of DeepSeek-V3: experts are chosen by a score with a bias,
            and weighted by the score without it.
        expert_groups, groups_per_token: number of groups of experts, and how many of them a token
            chooses from, if the router is "sigmoid".
        expert_scale: factor of the weights of a token's experts.
        shared_d_ff: width of a feed-forward network of all tokens beside the experts; 0: none.
        shared_gate: whether each token weights the output of this network by a sigmoid.
        norm_eps: constant under the root of a norm.
        tie_embeddings: whether the head is the embedding.
        bos_id, eos_ids: beginning-of-sequence id and end-of-sequence ids.
        layout: name of the family in whose layout the model is stored, where no other field tells.
    """

    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    padded_vocab_size: int = 0
    positions: str = "rotary"
    ffn: str = "swiglu"
    norm: str = "rms"
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    biases: str = "none"
    rope_theta: float = 10_000.0
    rotary_dim: int = 0
    rope_interleaved: bool = False
    rope_theta_local: float = 0.0
    rope_scaling: tuple = ()
    windows: tuple[int, ...] = ()
    changes: tuple[tuple[tuple[str, Any], ...], ...] = ()
    mixer: str = "attention"
    query_rank: int = 0
    latent_rank: int = 0
    value_dim: int = 0
    delta_taps: int = 0
    attention_gate: bool = False
    recent: int = 0
    sinks: int = 0
    query_scale: float = 0.0
    value_norm: bool = False
    value_is_key: bool = False
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: bool = False
    layer_inputs: int = 0
    layer_input_rows: int = 0
    output_scale: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    renormalize: bool = True
    router: str = "softmax"
    expert_groups: int = 1
    groups_per_token: int = 1
    expert_scale: float = 1.0
    shared_d_ff: int = 0
    shared_gate: bool = False
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    layout: str = ""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and type(value) is not int:
                raise InputError(f"{field.name}: expected an integer, found {short_repr(value)}")
        if self.vocab_rows < self.vocab_size:
            raise InputError(
                f"padded_vocab_size: expected at least vocab_size={self.vocab_size}, "
                f"found {self.padded_vocab_size}"
            )
        for field in ("rope_scaling", "windows", "changes", "eos_ids"):
            value = getattr(self, field)
            if not isinstance(value, (tuple, list)):
                raise InputError(f"{field}: expected a tuple, found {short_repr(value)}")
            object.__setattr__(self, field, _as_tuple(value))
        for id in self.eos_ids:  # an id outside of the vocabulary would never end a sequence
            if type(id) is not int or not 0 <= id < self.vocab_size:
                raise InputError(
                    f"eos_ids: expected token ids in [0, {self.vocab_size}), found {short_repr(id)}"
                )
        for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}: expected at least 1, found {getattr(self, field)}")
        if self.recent < 0 or self.sinks < 0 or (self.sinks and not self.recent):
            raise InputError(
                "recent, sinks: expected numbers >= 0, and sinks only beside recent tokens, "
                f"found {self.recent} and {self.sinks}"
            )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"found {self.num_heads}"
            )
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise InputError(
                    f"{field}: expected {' or '.join(choices)}, "
                    f"found {short_repr(getattr(self, field))}"
                )
        if self.positions == "relative" and self.d_model % 2:
            raise InputError(f"d_model: expected an even number, found {self.d_model}")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise InputError(
                f"experts_per_token: expected 1 to num_experts={self.num_experts}, "
                f"found {self.experts_per_token}"
            )
        config_checks.check_groups(self)
        config_checks.check_rotary(self)
        config_checks.check_changes(self, _OF_MODEL)
        config_checks.check_delta(self)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer's state can only be extended (`caches.State`)."""
        return self.mixer == "delta" or any(
            self.layer(index).is_recurrent for index in range(len(self.changes))
        )

    @property
    def vocab_rows(self) -> int:
        """Number of rows of embedding and head."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def num_weights(self) -> int:
        """Number of parameters in matrices, without norms, biases and position tables."""
        return weight_counts.num_weights(self)

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Sizes of a token's key and value in the cache, per key-value head."""
        latent = self.mixer == "latent"  # the key is also the value
        return (self.latent_rank + self.rotary_dim, 0) if latent else (self.head_dim,) * 2

    def window(self, layer: int) -> int:
        """Returns the attention window of a layer; 0: none."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def layer(self, layer: int) -> "Config":
        """Returns the config of one layer alone: its window in `windows`, and no `changes`."""
        change = self.changes[layer % len(self.changes)] if self.changes else ()
        return _own_config(self, self.window(layer), change)

    def source(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer reads: itself, unless it shares others'.

        That is the last earlier layer with attention and the same window. Raises InputError if
        there is none, or if it has other heads.
        """
        own = self.layer(layer)
        if own.mixer != "shared":
            return layer
        for index in reversed(range(layer)):
            other = self.layer(index)
            if other.mixer == "attention" and other.windows == own.windows:
                if (other.num_kv_heads, other.head_dim) == (own.num_kv_heads, own.head_dim):
                    return index
                break
        kind = f"a window of {own.windows[0]}" if own.windows else "full attention"
        raise InputError(
            f"mixer: layer {layer} shares the keys of an earlier layer with {kind} and the same "
            "heads, expected one, found none"
        )


@functools.lru_cache(4096)
def _own_config(config: Config, window: int, change: tuple[tuple[str, Any], ...]) -> Config:
    windows = (window,) if window else ()
    return dataclasses.replace(config, windows=windows, changes=(), **dict(change))


def _as_tuple(value: Any) -> Any:
    """Returns lists, which config files have, as tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, (tuple, list)) else value


def sizes(
    layers: int, width: int, d_ff: int, heads: int, groups: int, head_dim: int = 0, **more
) -> dict[str, object]:
    """Returns fields of a `Config` from sizes in the order in which papers list them.

    A `head_dim` of 0 means width / heads.
    """
    return {
        "num_layers": layers,
        "d_model": width,
        "d_ff": d_ff,
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": head_dim or width // heads,
        **more,
    }
