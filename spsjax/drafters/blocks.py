"""Base class of block drafters, which read a block of mask tokens in one pass.

The block is the last committed token, the *anchor*, and a mask token in each slot behind it. Its
layers attend to the target's features of all tokens before the anchor, whose keys and values are
cached per layer, and to the whole block. DFlash (Chen et al. 2026, 2602.06036) is the plain form.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from spsjax.drafters import base, features, pairs, pending, vocabulary
from spsjax.drafters.block_layers import Backbone, default_tap_layers
from spsjax.errors import InputError, short_repr
from spsjax.models import caches as kv
from spsjax.models import transformer
from spsjax.models.attention import capped
from spsjax.models.config import Config
from spsjax.models.linear import head_logits
from spsjax.types import Array, ModelOutput, PyTree, pytree_dataclass
from spsjax.utils.fields import flag, integer, number
from spsjax.utils.from_config import build

CAUSAL = "none", "windows", "all"


@pytree_dataclass
class BlockState:
    """State of a `BlockDrafter`."""

    cache: kv.KVCache  # keys and values of the features of all tokens before the anchor, per layer
    pending: pending.Pending


@dataclasses.dataclass(frozen=True)
class BlockDrafter(vocabulary.OwnVocabulary, pairs.LayerDrafter):
    """Drafts with layers over the target's features and a block of mask tokens.

    With a vocabulary of its own a drafter has a head of its own, too; else it uses the target's.

    Attributes:
        config: shape of the layers.
        tap_layers: layers of the target whose inputs are read.
        block_size: number of slots, the anchor's included. The block is always whole, also for a
            smaller K: each slot attends to all of them, and the weights were trained so.
        mask_token_id: id of the token behind the anchor, which may be in the target's padding.
        anchor_drafts: whether the anchor's own slot drafts the first token. Else the slot behind it
            does, and slot i drafts the token of its own position.
        causal: layers whose slots attend to earlier slots only: "none", those with a window
            ("windows"), or "all". A window counts from each slot, also to the slots behind it.
        embed_scale: factor of the embeddings of the block, the anchor's included. They are rows of
            the target's embedding, without a factor of the target itself (sqrt(D) in Gemma).
        output_scale: factor of the logits.
        softcap: limit c in c tanh(x / c) for the logits, in place of the target's; 0: none.
        vocab_size: R, size of the draft vocabulary; 0: the target's.
    """

    tap_layers: tuple[int, ...] = (2, 16, 29)
    block_size: int = integer(16, 2)
    mask_token_id: int = integer(0)
    anchor_drafts: bool = flag(False)
    causal: str = "none"
    embed_scale: float = number(1.0, above=True)
    output_scale: float = number(1.0, above=True)
    softcap: float = number(0.0)
    vocab_size: int = integer(0)

    module: ClassVar[type[nnx.Module]] = Backbone
    steps_name = "drafting slots"

    def __post_init__(self) -> None:
        super().__post_init__()
        features.check_taps(self.tap_layers, self.target)
        object.__setattr__(self, "vocab_size", self.vocab_size or self.target.vocab_size)
        if self.causal not in CAUSAL:
            raise InputError(
                f"causal: expected one of {', '.join(CAUSAL)}, found {short_repr(self.causal)}"
            )
        if self.block_size > self.target.max_positions:
            raise InputError(
                f"block_size: expected at most the target's {self.target.max_positions} positions, "
                f"found {self.block_size}"
            )
        if self.mask_token_id >= self.target.vocab_rows:
            raise InputError(
                f"mask_token_id: expected a row of the target's embedding, below "
                f"{self.target.vocab_rows}, found {self.mask_token_id}"
            )

    @classmethod
    def from_config(cls, options: Mapping[str, Any], target: Config) -> Self:
        """Returns the drafter of a config. Sizes that are 0 or missing are the target's.

        Without `tap_layers` the drafter reads `num_layers` layers, evenly spaced. A `mask_token_id`
        of -1 is the last row of the target's embedding, which no text contains if it is padding.
        """
        others = dict(options)
        layers = others.pop("num_layers", 5)
        layer = pairs.layer_config(others, target, num_layers=layers, qk_norm=True)
        taps = others.pop("tap_layers", ()) or default_tap_layers(target.num_layers, layers)
        if others.get("mask_token_id", -1) == -1:
            others["mask_token_id"] = target.vocab_rows - 1
        others["tap_layers"] = tuple(taps) if isinstance(taps, list) else taps
        return build("drafter", cls, others, config=layer, target=target)

    @property
    def max_steps(self) -> int:
        return self.block_size - (not self.anchor_drafts)

    @property
    def least_steps(self) -> int:
        return 1

    @property
    def module_config(self) -> Hashable:
        return self

    @property
    def sharding_config(self) -> Config:
        return dataclasses.replace(self.config, vocab_size=self.vocab_size)

    @property
    def own_head(self) -> bool:
        """Whether the drafter has a head of its own, over some of the target's tokens."""
        return self.vocab_size < self.target.vocab_size

    @property
    def constants(self) -> tuple[str, ...]:  # type: ignore[override]  # fields decide
        return (vocabulary.IDS,) if self.own_head else ()

    def from_target(self, weights: PyTree, params: PyTree) -> PyTree:
        if not self.own_head:
            return weights
        kernel = transformer.head_kernel(self.target, params["target"])
        kernel = kernel[:, params["drafter"][vocabulary.IDS]].astype(jnp.float32)
        return weights | {"head": {"kernel": kernel}}

    def head_weights(self, params: PyTree) -> PyTree:
        return params["drafter"]["head"] if self.own_head else super().head_weights(params)

    def reach(self, layer: int) -> int:
        """Returns the number of later slots to which a slot attends in a layer; 0: it is causal."""
        window = self.config.window(layer)
        if self.causal == "all" or (self.causal == "windows" and window):
            return 0
        return min(window or self.block_size, self.block_size) - 1

    def passes(self, params: PyTree) -> dict[str, base.Pass]:
        own, K = params["drafter"], self.num_speculative_tokens
        attentions = [layer["attention"] for layer in own["layers"].values()]
        reading = own["fc"], [(weights["key"], weights["value"]) for weights in attentions]
        return {
            "draft": base.Pass(own["layers"], tokens=self.block_size, reads_cache=True),
            "logits": base.Pass(self.head_weights(params), tokens=K),
            "features": base.Pass(reading, tokens=K + 1, phase="sync"),
        }

    def raw_features(self, output: ModelOutput) -> Array:
        return jnp.concatenate(output.taps, axis=-1)

    def fuse(self, params: PyTree, raw_BTW: Array) -> Array:
        return self.bind(params).fuse(raw_BTW.astype(self.dtype(params)))

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        return BlockState(*self.empty(params, batch, slots, self.config.num_layers))

    def extend(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BT: Array,
        features_BTD: Array,
        starts_B: Array,
        pairs_B: Array,
    ) -> PyTree:
        cache = state.cache.at(starts_B)
        block = self.bind(params).read(features_BTD, cache)
        return BlockState(cache.write(block, None, pairs_B, features_BTD), state.pending)

    def run(self, params: PyTree, anchors_B: Array, cache: kv.KVCache) -> Array:
        """Returns the outputs [B, P, D] of the slots of blocks that follow the cache."""
        size = len(anchors_B), self.block_size - 1
        masks = jnp.full(size, self.mask_token_id, anchors_B.dtype)
        tokens_BP = jnp.concatenate([anchors_B[:, None], masks], axis=1)
        # The mask token may be in the padding of the vocabulary, which `embed` would clip.
        rows = self.target.vocab_rows
        plain = dataclasses.replace(self.target, vocab_size=rows, embed_scale=False)
        embedded = transformer.embed(plain, params["target"], tokens_BP).astype(self.dtype(params))
        if self.embed_scale != 1:
            embedded = embedded * jnp.asarray(self.embed_scale, embedded.dtype)
        return self.bind(params)(embedded, cache)

    def drafting(self, outputs_BPD: Array) -> Array:
        """Returns the outputs of the slots that draft, one per depth."""
        return outputs_BPD[:, 1 - self.anchor_drafts :]

    def slots(self, params: PyTree, state: BlockState, anchors_B: Array) -> Array:
        """Returns the outputs [B, K, D] of the first K slots that draft in this round."""
        outputs = self.drafting(self.run(params, anchors_B, state.cache))
        return outputs[:, : self.num_speculative_tokens]

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        if self.own_head:
            logits = head_logits(outputs_BTD, self.bind(params).head.kernel[...])
        else:
            weights = params["target"]
            uncapped = dataclasses.replace(self.target, logit_softcap=0.0)
            outputs = outputs_BTD.astype(weights["norm"]["scale"].dtype)
            logits = transformer.head(uncapped, weights, outputs)
        return capped(logits * self.output_scale, self.softcap)

    def training_passes(self, steps: int, first: float, later: float) -> float:
        return self.block_size * first

    def unrolled(
        self,
        params: PyTree,
        next_BT: Array,
        features_BTD: Array,
        steps: int,
        detached: bool = False,
        remat: bool = False,
        later: Array | None = None,
        anchors: Array | None = None,
    ) -> Iterator[Array]:
        B, T = next_BT.shape
        text = self.bind(params).read(features_BTD, None)
        # Every index is a row of its own, with the anchor behind its prefix of the text. The rows
        # share one cache of the text's features, and differ in its length.
        index = jnp.arange(T) if anchors is None else anchors
        first_BN, lengths = features.entries(next_BT, index), features.lengths_before(index, B)
        cache = kv.KVCache(text.keys, text.values, lengths, (None,) * len(text.keys))
        run = jax.checkpoint(self.run) if remat else self.run
        outputs = self.drafting(run(params, first_BN.reshape(-1), cache))
        for step in range(steps):
            output = outputs[:, step].reshape(*first_BN.shape, -1)
            yield output if step == 0 or later is None else output[:, later]
