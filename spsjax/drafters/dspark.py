"""DSpark: DFlash with a Markov head and a confidence head (2607.05147).

The Markov head adds logits that depend on the token before, so that a block's tokens fit together.
The confidence head estimates whether a token will be accepted, before it is drawn. **Lossless**, as
is every drafter.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.drafters import block_folders, blocks, stopping
from spsjax.errors import InputError, short_repr
from spsjax.models.hf.fields import COUNT, FLAG
from spsjax.models.linear import head_logits, make_linear
from spsjax.types import Array, PyTree
from spsjax.utils import traced
from spsjax.utils.fields import flag, integer

KINDS = "vanilla", "gated"
KIND = '"vanilla" or "gated"', KINDS.__contains__


class MarkovHead(nnx.Module):
    """Logits of low rank that depend on the token before."""

    def __init__(self, drafter: "Drafter", *, dtype, rngs: nnx.Rngs):
        rank, rows = drafter.markov_rank, drafter.target.vocab_rows
        normal = nnx.initializers.normal(0.02)
        make = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.markov_w1 = nnx.Embed(rows, rank, embedding_init=normal, **make)
        zeros = nnx.initializers.zeros_init()
        self.markov_w2 = nnx.Linear(rank, rows, use_bias=False, kernel_init=zeros, **make)
        if drafter.markov_kind == "gated":
            inputs = drafter.config.d_model + rank
            self.gate_proj = make_linear(inputs, rank, True, dtype=dtype, rngs=rngs)


class ConfidenceHead(nnx.Module):
    """Estimate of the probability that a slot's token is accepted."""

    def __init__(self, drafter: "Drafter", *, dtype, rngs: nnx.Rngs):
        inputs = drafter.config.d_model + drafter.markov_rank * drafter.confidence_reads_before
        self.proj = make_linear(inputs, 1, True, dtype=dtype, rngs=rngs)


class DSpark(blocks.Backbone):
    """Layers of DFlash, and two heads."""

    def __init__(self, drafter: "Drafter", *, dtype, rngs: nnx.Rngs):
        super().__init__(drafter, dtype=dtype, rngs=rngs)
        self.markov_head = MarkovHead(drafter, dtype=dtype, rngs=rngs)
        if drafter.has_confidence:
            self.confidence_head = ConfidenceHead(drafter, dtype=dtype, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Drafter(blocks.ConditionalDrafter):
    """Drafts a block from left to right with a Markov head. Lossless.

    Attributes:
        markov_rank: rank of the Markov head's logits.
        markov_kind: "vanilla", or "gated" by the slot's output.
        has_confidence: whether there is a confidence head.
        confidence_reads_before: whether the confidence head reads the token before, too.
        least_confidence: probability, by the confidence head, that a chain is accepted up to and
            including a slot, below which the chain ends before that slot; 0: chains do not end
            early.
    """

    anchor_drafts: bool = flag(True)
    markov_rank: int = integer(256, 1)
    markov_kind: str = "vanilla"
    has_confidence: bool = flag(True)
    confidence_reads_before: bool = flag(True)
    least_confidence: float = traced.share(0.0, off=0.0)

    module = DSpark

    def __post_init__(self):
        super().__post_init__()
        if self.markov_kind not in KINDS:
            raise InputError(
                f"markov_kind: expected {' or '.join(KINDS)}, found {short_repr(self.markov_kind)}"
            )
        if self.ends_early and (self.tree is not None or not self.has_confidence):
            raise InputError(
                "least_confidence: expected 0 for trees, and without a confidence head, "
                f"found {self.least_confidence}"
            )

    @property
    def ends_early(self) -> bool:
        """Whether chains may end before K tokens."""
        value = self.least_confidence  # any number but 0 is traced while a program is traced
        return not (isinstance(value, (int, float)) and value == 0)

    @property
    def score_sizes(self):
        if not self.ends_early:
            return super().score_sizes
        K = self.num_speculative_tokens
        return *(size for size in (0, *stopping.SCORE_SIZES) if size < K), K

    def correcting(self, weights):
        head = weights["markov_head"]
        return [head[name] for name in ("markov_w2", "gate_proj") if name in head]

    def before(self, params, tokens_BT):
        return self.bind(params).markov_head.markov_w1(tokens_BT)

    def corrected(self, params, choices, outputs_BTD, before_BTR):
        head = self.bind(params).markov_head
        if self.markov_kind == "gated":
            both = jnp.concatenate([outputs_BTD, before_BTR], axis=-1)
            before_BTR = before_BTR * jax.nn.sigmoid(head.gate_proj(both))
        bias = head_logits(before_BTR, head.markov_w2.kernel[...])
        return choices + bias[..., : self.target.vocab_size].astype(choices.dtype)

    def learned(self, params, outputs_BTD, target_logs_BTR, depth=0, hard=False):
        """Returns the corrected logits to train, and the loss of the confidence head.

        That loss is the binary cross entropy with 1 - TV, the probability that the token is
        accepted. No gradient flows into the draft's distribution through that label.
        """
        learned = super().learned(params, outputs_BTD, target_logs_BTR, depth)
        if not self.has_confidence:
            return learned
        outputs, before = jnp.split(outputs_BTD, (self.config.d_model,), axis=-1)
        logs = jax.nn.log_softmax(learned.drawn.astype(jnp.float32))
        overlap = jnp.sum(jnp.exp(jnp.minimum(target_logs_BTR, logs)), axis=-1)
        guess = self.confidence(params, outputs, before)
        loss = jax.nn.softplus(guess) - jax.lax.stop_gradient(overlap) * guess
        return learned._replace(own=loss)

    def propose(self, params, state, now):
        outputs = self.slots(params, state, now.root)
        proposal = self.drafted(params, outputs, now)
        if not self.ends_early:
            return proposal
        kept = self.kept(params, outputs, now.root, proposal.tokens)
        return dataclasses.replace(proposal, tokens=jnp.where(kept, proposal.tokens, -1))

    def kept(self, params: PyTree, outputs_BKD: Array, root_B: Array, tokens_BK: Array) -> Array:
        """Returns [B, K] bool, which slots have a token.

        It depends on the tokens before a slot, and never on the slot's own token. Else a token
        would be proposed less often than its distribution says, and samples would be biased.
        """
        before = jnp.concatenate([root_B[:, None], tokens_BK[:, :-1]], axis=1)
        before = self.before(params, jnp.maximum(before, 0))
        chances = jax.nn.sigmoid(self.confidence(params, outputs_BKD, before))
        return jnp.cumprod(chances, axis=1) >= self.least_confidence

    def confidence(self, params, outputs_BTD, before_BTR):
        """Returns logits [B, T] of the probability that a slot's token is accepted."""
        read = outputs_BTD
        if self.confidence_reads_before:
            read = jnp.concatenate([outputs_BTD, before_BTR], axis=-1)
        return self.bind(params).confidence_head.proj(read)[..., 0].astype(jnp.float32)


_CONFIDENCE = "confidence_head.proj.weight"


class _Layout(block_folders.BlockLayout):
    """Layout of DeepSpec, whose keys are all at the top level, and of `speculators`."""

    def drafter_fields(self, folder, target):
        fields = super().drafter_fields(folder, target)
        return fields | {"has_confidence": _CONFIDENCE in folder.stored}

    def to_json(self, drafter, target_name, dtype):
        raw = super().to_json(drafter, target_name, dtype)
        return raw | {"enable_confidence_head": drafter.has_confidence}


LAYOUT = _Layout(
    "dspark",
    "Qwen3DSparkModel",
    {
        "markov_rank": ("markov_rank", COUNT, 256),
        "markov_kind": ("markov_head_type", KIND, "vanilla"),
        "confidence_reads_before": ("confidence_head_with_markov", FLAG, True),
    },
    has_section=False,
)
