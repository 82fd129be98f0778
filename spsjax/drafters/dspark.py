"""DSpark: DFlash with a Markov head and a confidence head (2607.05147).

The Markov head adds logits that depend on the token before, so that a block's tokens fit together;
a recurrent one depends on all draft tokens before. The confidence head estimates whether a token
will be accepted, before it is drawn; schedules such as "confidence" read it. **Lossless**, as is
every drafter.
"""

import dataclasses
import functools
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from spsjax.drafters import block_folders, block_layers, conditional_blocks, features
from spsjax.drafters.choices import Choices
from spsjax.drafters.folders import Folder
from spsjax.errors import InputError, short_repr
from spsjax.models.config import Config
from spsjax.models.hf.fields import COUNT, FLAG
from spsjax.models.linear import head_logits, make_linear
from spsjax.types import Array, Proposal, PyTree, Round
from spsjax.utils.fields import flag, integer

KINDS = "vanilla", "gated", "rnn"
KIND = f"one of {', '.join(KINDS)}", KINDS.__contains__


class MarkovHead(nnx.Module):
    """Logits of low rank that depend on the token before."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        rank, width = drafter.markov_rank, drafter.config.d_model
        rows = drafter.target.vocab_rows
        normal = nnx.initializers.normal(0.02)
        make = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.markov_w1 = nnx.Embed(rows, rank, embedding_init=normal, **make)
        zeros = nnx.initializers.zeros_init()
        columns = drafter.vocab_size if drafter.own_head else rows
        self.markov_w2 = nnx.Linear(rank, columns, use_bias=False, kernel_init=zeros, **make)
        linear = functools.partial(make_linear, bias=True, dtype=dtype, rngs=rngs)
        if drafter.markov_kind == "gated":
            self.gate_proj = linear(width + rank, rank)
        if drafter.markov_kind == "rnn":
            self.joint_proj = linear(2 * rank + width, 3 * rank)

    def biases(self, outputs_BTD: Array, before_BTR: Array, state_BTM: Array) -> Array:
        """Returns the logits that are added, with the padding of the vocabulary.

        Args:
            outputs_BTD: outputs of the slots.
            before_BTR: embeddings of the tokens before.
            state_BTM: state of the recurrence after the slots before; M is 0 without one.
        """
        read = before_BTR
        if hasattr(self, "gate_proj"):
            both = jnp.concatenate([outputs_BTD, before_BTR], axis=-1)
            read = before_BTR * jax.nn.sigmoid(self.gate_proj(both))
        if hasattr(self, "joint_proj"):
            read = jnp.tanh(self._thirds(outputs_BTD, before_BTR, state_BTM)[2])
        return head_logits(read, self.markov_w2.kernel[...])

    def states(self, outputs_BTD: Array, before_BTR: Array, state_BTM: Array) -> Array:
        """Returns the states [B, T, R] of the recurrence after slots; arguments as of `biases`."""
        gate, new, _ = self._thirds(outputs_BTD, before_BTR, state_BTM)
        gate = jax.nn.sigmoid(gate)
        return gate * state_BTM + (1 - gate) * jnp.tanh(new)

    def _thirds(self, outputs_BTD: Array, before_BTR: Array, state_BTR: Array) -> list[Array]:
        both = jnp.concatenate([state_BTR, before_BTR, outputs_BTD], axis=-1)
        return jnp.split(self.joint_proj(both), 3, axis=-1)


class ConfidenceHead(nnx.Module):
    """Estimate of the probability that a slot's token is accepted."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        inputs = drafter.config.d_model + drafter.markov_rank * drafter.confidence_reads_before
        self.proj = make_linear(inputs, 1, True, dtype=dtype, rngs=rngs)


class DSpark(block_layers.Backbone):
    """Layers of DFlash, and two heads."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        super().__init__(drafter, dtype=dtype, rngs=rngs)
        self.markov_head = MarkovHead(drafter, dtype=dtype, rngs=rngs)
        if drafter.has_confidence:
            self.confidence_head = ConfidenceHead(drafter, dtype=dtype, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Drafter(conditional_blocks.ConditionalDrafter):
    """Drafts a block from left to right with a Markov head. Lossless.

    Attributes:
        markov_rank: rank of the Markov head's logits.
        markov_kind: "vanilla"; "gated" by the slot's output; or "rnn", a recurrence over the slots
            that draft, whose state is 0 before the first. Their authors define it for a block whose
            anchor drafts.
        has_confidence: whether there is a confidence head.
        confidence_reads_before: whether the confidence head reads the token before, too.
    """

    anchor_drafts: bool = flag(True)
    markov_rank: int = integer(256, 1)
    markov_kind: str = "vanilla"
    has_confidence: bool = flag(True)
    confidence_reads_before: bool = flag(True)

    module = DSpark

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_kind not in KINDS:
            raise InputError(
                f"markov_kind: expected {' or '.join(KINDS)}, found {short_repr(self.markov_kind)}"
            )
        if self.markov_kind == "rnn" and not self.anchor_drafts:
            raise InputError(
                "markov_kind: expected vanilla or gated if the anchor does not draft, found rnn"
            )

    def correcting(self, weights: PyTree) -> PyTree:
        head = weights["markov_head"]
        names = "markov_w2", "gate_proj", "joint_proj"
        return [head[name] for name in names if name in head]

    def before(self, params: PyTree, tokens_BT: Array) -> Array:
        return self.bind(params).markov_head.markov_w1(tokens_BT)

    @property
    def memory_size(self) -> int:
        return self.markov_rank if self.markov_kind == "rnn" else 0

    def corrected(
        self, params: PyTree, own: Choices, outputs_BTD: Array, before_BTW: Array
    ) -> Choices:
        read = jnp.split(before_BTW, (self.markov_rank,), axis=-1)
        bias = self.bind(params).markov_head.biases(outputs_BTD, *read)
        logits = own.logits + bias[..., : self.vocab_size].astype(own.logits.dtype)
        return dataclasses.replace(own, logits=logits)

    def remember(self, params: PyTree, outputs_BTD: Array, before_BTW: Array) -> Array:
        if not self.memory_size:
            return super().remember(params, outputs_BTD, before_BTW)
        read = jnp.split(before_BTW, (self.markov_rank,), axis=-1)
        return self.bind(params).markov_head.states(outputs_BTD, *read)

    def learned(
        self,
        params: PyTree,
        outputs_BTD: Array,
        target_logs_BTR: Array,
        depth: int | Array = 0,
        hard: bool = False,
    ) -> features.Learned:
        """Returns the corrected logits to train, and the loss of the confidence head.

        That loss is the binary cross entropy with 1 - TV, the probability that the token is
        accepted. No gradient flows into the draft's distribution through that label.
        """
        learned = super().learned(params, outputs_BTD, target_logs_BTR, depth)
        if not self.has_confidence:
            return learned
        width = self.config.d_model
        outputs, before, _ = jnp.split(outputs_BTD, (width, width + self.markov_rank), axis=-1)
        logs = jax.nn.log_softmax(learned.drawn.astype(jnp.float32))
        overlap = jnp.sum(jnp.exp(jnp.minimum(target_logs_BTR, logs)), axis=-1)
        guess = self.confidence(params, outputs, before)
        loss = jax.nn.softplus(guess) - jax.lax.stop_gradient(overlap) * guess
        return learned._replace(own=loss)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        outputs = self.slots(params, state, now.root)
        proposal = self.drafted(params, outputs, now)
        if proposal.confidence is None or not self.has_confidence:
            return proposal
        # The head reads the tokens before a slot, and never the slot's own.
        before = jnp.concatenate([now.root[:, None], proposal.tokens[:, :-1]], axis=1)
        before = self.before(params, jnp.maximum(before, 0))
        chances = jax.nn.sigmoid(self.confidence(params, outputs, before))
        return dataclasses.replace(proposal, confidence=chances)

    def confidence(self, params: PyTree, outputs_BTD: Array, before_BTR: Array) -> Array:
        """Returns logits [B, T] of the probability that a slot's token is accepted."""
        read = outputs_BTD
        if self.confidence_reads_before:
            read = jnp.concatenate([outputs_BTD, before_BTR], axis=-1)
        return self.bind(params).confidence_head.proj(read)[..., 0].astype(jnp.float32)


_CONFIDENCE = "confidence_head.proj.weight"


class _Layout(block_folders.BlockLayout[Drafter]):
    """Layout of DeepSpec, whose keys are all at the top level, and of `speculators`."""

    rows: Set[str] = block_folders.BlockLayout.rows | {"markov_head.markov_w2.weight"}

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        fields = super().drafter_fields(folder, target)
        stored = _CONFIDENCE in folder.stored
        if folder.fields.get("enable_confidence_head", FLAG, stored) and not stored:
            raise InputError(
                f"{folder.path}: expected a tensor {_CONFIDENCE}, as enable_confidence_head is "
                "true in config.json, found none"
            )
        return fields | {"has_confidence": stored}

    def to_json(self, drafter: Drafter, target_name: str, dtype: str) -> dict:
        raw = super().to_json(drafter, target_name, dtype)
        return raw | {"enable_confidence_head": drafter.has_confidence}


LAYOUT = _Layout(
    "dspark",
    ("Qwen3DSparkModel", "DSparkSpeculator"),
    {
        "markov_rank": ("markov_rank", COUNT, 256),
        "markov_kind": ("markov_head_type", KIND, "vanilla"),
        "confidence_reads_before": ("confidence_head_with_markov", FLAG, True),
    },
    has_section=False,
)
