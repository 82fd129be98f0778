"""The shape of a decoder, and every flag in which families of models differ."""

import dataclasses

from spsjax.errors import InputError, short_repr

_CHOICES = {
    "positions": ("rotary", "relative", "learned"),
    "ffn": ("swiglu", "geglu", "gelu"),
    "norm": ("rms", "layer"),
    "biases": ("none", "qkv", "all"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder's shape. Hashable, so that it can be a static argument of `jit`.

    Attributes:
        vocab_size, d_model, d_ff, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        max_positions: the context.
        padded_vocab_size: rows of embedding and head, where there are more than tokens; 0: as many.
        positions: "rotary", "learned", or "relative": Transformer-XL's, with a projection of their
            own.
        ffn: "swiglu" and "geglu" have a gate, "gelu" has two matrices only; GELU is tanh's.
        norm: "rms", or "layer" with a bias.
        norm_offset: what is added to a norm's scale (Gemma: 1).
        post_norms: whether a block's two outputs have norms of their own, before they are added.
        qk_norm: whether queries and keys of each head have a norm, before they are rotated.
        biases: of "none" of the linear layers, of query, key and value ("qkv"), or of "all".
        rope_theta: base of the rotary frequencies.
        rope_theta_local: the same in layers with a window; 0: no other one.
        rope_scaling: () for none; ("linear", factor); or ("llama3", factor, low, high, original
            context), which leaves high frequencies alone. Layers with a window of a model with
            `rope_theta_local` are not scaled.
        windows: of each layer, repeated, how many tokens a token sees, itself included; 0: all.
        query_scale: of scores; 0: 1 / sqrt(head_dim).
        attention_softcap, logit_softcap: c tanh(x / c) of scores and of logits; 0: as they are.
        embed_scale: whether embeddings are multiplied by sqrt(d_model).
        num_experts: feed-forward networks a block, of which a token goes to the `experts_per_token`
            that the router likes best; 0: one, and no router. Their weights add up to 1 if
            `renormalize`.
        norm_eps: in a norm's root.
        tie_embeddings: whether the head is the embedding.
        bos_id, eos_ids: of the tokenizer.
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
    rope_theta_local: float = 0.0
    rope_scaling: tuple = ()
    windows: tuple[int, ...] = ()
    query_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    renormalize: bool = True
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

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
        for field in ("rope_scaling", "windows", "eos_ids"):  # a config file has lists
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}: expected at least 1, found {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"found {self.num_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise InputError(f"head_dim: expected an even number, found {self.head_dim}")
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

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head."""
        return self.padded_vocab_size or self.vocab_size

    def window(self, layer: int) -> int:
        """How many tokens a token sees in that layer; 0: all."""
        return self.windows[layer % len(self.windows)] if self.windows else 0


def shape(
    layers: int, width: int, d_ff: int, heads: int, groups: int, head_dim: int = 0, **more
) -> dict[str, object]:
    """Fields of a `Config` in the order in which papers have them; head_dim 0: width / heads."""
    return {
        "num_layers": layers,
        "d_model": width,
        "d_ff": d_ff,
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": head_dim or width // heads,
        **more,
    }
