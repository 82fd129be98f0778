"""DFlash2: DFlash with convolutions in its layers and a selector of candidates (inco.ai, 2026).

The convolutions mix each slot of the block with the slot before it. The selector draws tokens from
left to right among the most probable ones of each slot, and scores how well a candidate follows the
token before it. So its distributions are conditional. **Lossless**, as is every drafter.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from spsjax.drafters import block_folders, block_layers, conditional_blocks, features
from spsjax.drafters.choices import Choices
from spsjax.errors import InputError
from spsjax.models.caches import Segment
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.hf.fields import COUNT
from spsjax.models.layers import DecoderBlock
from spsjax.models.linear import Linear, make_linear
from spsjax.types import Array, PyTree
from spsjax.utils.fields import integer


class GroupedConv(nnx.Module):
    """Causal convolutions over the slots of a block, before and after a sub-layer.

    A kernel is the sum of a fixed part per channel, and of a part per group of channels, which is a
    projection of the sub-layer's normalised input. Without training it is the identity.
    """

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width, taps = drafter.config.d_model, drafter.conv_kernel_size
        self.shape = 2, taps, width // drafter.conv_group_size
        self.base_kernel = nnx.Param(jnp.zeros((2, taps, width), dtype).at[:, 0].set(1))
        self.kernel_projection = Linear(
            width,
            2 * taps * self.shape[2],
            use_bias=False,
            dtype=dtype,
            param_dtype=dtype,
            kernel_init=nnx.initializers.zeros_init(),
            rngs=rngs,
        )

    def __call__(self, read_BPD: Array, sublayer: Callable[[Array], Array]) -> Array:
        """Returns the output [B, P, D] of a sub-layer with both convolutions around it."""
        deltas = self.kernel_projection(read_BPD)
        deltas = deltas.reshape(*read_BPD.shape[:2], *self.shape)
        outputs = sublayer(self._convolved(read_BPD, deltas, 0))
        return self._convolved(outputs, deltas, 1)

    def _convolved(self, x_BPD: Array, deltas: Array, side: int) -> Array:
        (B, P, D), (_, taps, groups) = x_BPD.shape, self.shape
        base = self.base_kernel[...][side].reshape(taps, groups, -1)
        kernels = base + deltas[:, :, side, :, :, None]  # [B, P, taps, groups, D / groups]
        # Before the first slot there are zeros.
        padded = jnp.pad(x_BPD, ((0, 0), (taps - 1, 0), (0, 0))).reshape(B, -1, groups, D // groups)
        moved = (padded[:, taps - 1 - tap :][:, :P] for tap in range(taps))
        result = sum(kernels[:, :, tap] * rows for tap, rows in enumerate(moved))
        return result.reshape(B, P, D)


class ConvBlock(DecoderBlock):
    """Decoder block with convolutions around both sub-layers."""

    def __init__(
        self, drafter: "Drafter", layer: Config, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        super().__init__(layer, dtype=dtype, rngs=rngs)
        self.attention_conv = GroupedConv(drafter, dtype=dtype, rngs=rngs)
        self.ffn_conv = GroupedConv(drafter, dtype=dtype, rngs=rngs)

    def __call__(  # type: ignore[override]  # a draft skips no sub-layers
        self,
        x_BPD: Array,
        context: Context,
        cached: Sequence[Segment],
        earlier: KeysValues | None,
    ) -> tuple[Array, KeysValues]:
        rows = []

        def attention(read_BPD: Array) -> Array:
            attended, row = self.attention(read_BPD, context, cached, earlier)
            rows.append(row)
            return attended

        x_BPD = x_BPD + self.attention_conv(self.attention_norm(x_BPD), attention)
        return x_BPD + self.ffn_conv(self.ffn_norm(x_BPD), self.ffn), rows[0]


class CandidateSelector(nnx.Module):
    """Scores of how well a candidate follows a token, given the output of the candidate's slot."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        rank, rows = drafter.selector_rank, drafter.target.vocab_rows
        normal = nnx.initializers.normal(0.02)
        self.predecessor_codebook = nnx.Param(normal(rngs.params(), (rows, rank), dtype))
        self.successor_codebook = nnx.Param(normal(rngs.params(), (rows, rank), dtype))
        width = drafter.config.d_model
        self.hidden_projection = make_linear(width, rank, False, dtype=dtype, rngs=rngs)


class DFlash2(block_layers.Backbone):
    """Layers of DFlash with convolutions, and a selector."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        super().__init__(drafter, dtype=dtype, rngs=rngs)
        self.candidate_selector = CandidateSelector(drafter, dtype=dtype, rngs=rngs)

    def make_layer(
        self, drafter: Any, layer: Config, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> ConvBlock:
        return ConvBlock(drafter, layer, dtype=dtype, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Drafter(conditional_blocks.ConditionalDrafter):
    """Drafts a block from left to right among the candidates of each slot. Lossless.

    Other tokens than candidates have probability 0. The filters of sampling apply to the draft's
    distributions, too, as for all drafters.

    Attributes:
        conv_kernel_size: number of slots that a convolution reads, its own included.
        conv_group_size: number of channels with the same projected kernel.
        selector_rank: width of the selector's embeddings.
        selector_top_k: number of candidates per slot.
    """

    conv_kernel_size: int = integer(2, 1)
    conv_group_size: int = integer(16, 1)
    selector_rank: int = integer(256, 1)
    selector_top_k: int = integer(16, 1)

    module = DFlash2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.d_model % self.conv_group_size:
            raise InputError(
                f"conv_group_size: expected a divisor of d_model={self.config.d_model}, "
                f"found {self.conv_group_size}"
            )
        if self.own_head:
            raise InputError(
                f"vocab_size: expected the target's {self.target.vocab_size}, as candidates are of "
                f"its vocabulary, found {self.vocab_size}"
            )

    def correcting(self, weights: PyTree) -> PyTree:
        return weights["candidate_selector"]["hidden_projection"]

    def before(self, params: PyTree, tokens_BT: Array) -> Array:
        codebook = self.bind(params).candidate_selector.predecessor_codebook[...]
        return jnp.take(codebook, tokens_BT, axis=0, mode="clip")

    def own(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Choices:
        return self.candidates(super().own(params, outputs_BTD, depth).logits)

    def candidates(self, logits_BTV: Array) -> Choices:
        """Returns the most probable tokens of slots."""
        V = logits_BTV.shape[-1]
        ids = jnp.sort(lax.top_k(logits_BTV, min(self.selector_top_k, V))[1], axis=-1)
        return Choices(jnp.take_along_axis(logits_BTV, ids, axis=-1), ids, V)

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        return self.choices(params, outputs_BTD, depth).whole()

    def corrected(
        self, params: PyTree, own: Choices, outputs_BTD: Array, before_BTR: Array
    ) -> Choices:
        selector = self.bind(params).candidate_selector
        mixed = before_BTR * selector.hidden_projection(outputs_BTD.astype(before_BTR.dtype))
        after = jnp.take(selector.successor_codebook[...], own.all_ids(), axis=0, mode="clip")
        scores = jnp.einsum("btr,btcr->btc", mixed, after, preferred_element_type=own.logits.dtype)
        return dataclasses.replace(own, logits=own.logits + scores)

    def learned(
        self,
        params: PyTree,
        outputs_BTD: Array,
        target_logs_BTR: Array,
        depth: int | Array = 0,
        hard: bool = False,
    ) -> features.Learned:
        """Returns the slots' own logits to train, as for DFlash, and the selector's loss.

        That loss is the cross entropy of the label, the target's most probable token, among the
        candidates, after the text's own token. If the label is not a candidate, it takes the place
        of the last one (the `speculators` library). Unless labels are hard, it is the cross entropy
        of the target's distribution over these candidates. A single label would make the draft too
        sure of itself for temperatures above 0.
        """
        outputs, before = self.unpacked(outputs_BTD)
        own = super().own(params, outputs, depth).logits
        choices = self.candidates(own)
        label, ids = jnp.argmax(target_logs_BTR, axis=-1)[..., None], choices.all_ids()
        is_missing = ~jnp.any(ids == label, axis=-1)
        # The last candidate: the one with the lowest logit.
        last = jnp.argmin(choices.logits, axis=-1, keepdims=True) == jnp.arange(ids.shape[-1])
        ids = jnp.where(is_missing[..., None] & last, label, ids)
        candidates = jnp.take_along_axis(own, ids, axis=-1)
        labelled = Choices(candidates, ids, self.target.vocab_size)
        logs = jax.nn.log_softmax(self.corrected(params, labelled, outputs, before).logits)
        wanted = jax.nn.softmax(jnp.take_along_axis(target_logs_BTR, ids, axis=-1))
        loss = -jnp.sum(jnp.where(hard, ids == label, wanted) * logs, axis=-1)
        drawn = self.corrected(params, choices, outputs, before).whole()
        return features.Learned(drawn, own, loss)


LAYOUT = block_folders.BlockLayout[Drafter](
    "dflash2",
    ("DFlash2DraftModel", "DFlash2DraftModel"),
    {
        "conv_kernel_size": ("conv_kernel_size", COUNT, 2),
        "conv_group_size": ("conv_group_size", COUNT, 16),
        "selector_rank": ("selector_rank", COUNT, 256),
        "selector_top_k": ("selector_top_k", COUNT, 16),
    },
)
