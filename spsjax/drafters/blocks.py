"""Base class of block drafters, which read a block of mask tokens in one pass.

The block is the last committed token, the *anchor*, and a mask token in each slot behind it. Its
layers attend to the target's features of all tokens before the anchor, whose keys and values are
cached per layer, and to the whole block. DFlash (Chen et al. 2026, 2602.06036) is the plain form.
"""

import abc
import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from spsjax import tree
from spsjax.drafters import features, pairs, pending, sample, shapes, vocabulary
from spsjax.drafters.block_layers import Backbone, default_tap_layers
from spsjax.drafters.sample import Level
from spsjax.errors import InputError, short_repr
from spsjax.models import caches as kv
from spsjax.models import transformer
from spsjax.models.attention import capped
from spsjax.models.config import Config
from spsjax.models.linear import head_logits
from spsjax.parallel import sharding
from spsjax.types import Array, ModelOutput, Proposal, PyTree, Round, pytree_dataclass
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

    def step_weights(self, params: PyTree) -> PyTree:
        return params["drafter"] if self.own_head else super().step_weights(params)

    def reach(self, layer: int) -> int:
        """Returns the number of later slots to which a slot attends in a layer; 0: it is causal."""
        window = self.config.window(layer)
        if self.causal == "all" or (self.causal == "windows" and window):
            return 0
        return min(window or self.block_size, self.block_size) - 1

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


@dataclasses.dataclass(frozen=True)
class ConditionalDrafter(BlockDrafter):
    """Drafts tokens of a block from left to right: each depends on the token before it.

    One product gives the logits of all slots. For each token a small head corrects the logits of
    its slot by an embedding of the token before, and by what the slots before have remembered. So a
    token's distribution is conditional on the draft tokens before it, and the ratio of acceptance
    is exact.
    """

    @property
    def memory_size(self) -> int:
        """M, the numbers that slots remember."""
        return 0

    @abc.abstractmethod
    def before(self, params: PyTree, tokens_BT: Array) -> Array:
        """Returns the embeddings [B, T, R] of tokens before a slot."""

    def choices(self, logits_BTR: Array) -> PyTree:
        """Returns what `corrected` reads of slots' own logits, as arrays [B, T, ...]."""
        return logits_BTR

    @abc.abstractmethod
    def corrected(
        self, params: PyTree, choices: PyTree, outputs_BTD: Array, before_BTW: Array
    ) -> Array:
        """Returns the logits of slots, over the draft's vocabulary, after the tokens before them.

        Args:
            params: parameters of target and drafter.
            choices: result of `choices` for the slots.
            outputs_BTD: outputs of the slots.
            before_BTW: embeddings of the tokens before (`before`), and behind each the memory of
                the slots before, W = R + M.
        """

    def remember(self, params: PyTree, outputs_BTD: Array, before_BTW: Array) -> Array:
        """Returns the memory [B, T, M] after slots; the arguments are those of `corrected`.

        It depends on the tokens before a slot, and not on the slot's own token. It is 0 before the
        first slot that drafts.
        """
        return outputs_BTD[..., :0]

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        return self.drafted(params, self.slots(params, state, now.root), now)

    def drafted(self, params: PyTree, outputs_BKD: Array, now: Round) -> Proposal:
        """Returns tokens that are drawn one by one from the corrected logits of their slots."""
        own = self.choices(sharding.gather_vocab(super().draft_logits(params, outputs_BKD)))
        (B, _, _), dtype = outputs_BKD.shape, outputs_BKD.dtype

        def feed(memories_BFM: PyTree, level: Level) -> tuple[Array, Array | None, PyTree]:
            """Corrects the logits of the slot of a level (`sample.Feed`)."""

            def at_level(array: Array) -> Array:
                row = lax.dynamic_slice_in_dim(array, level.depth, 1, axis=1)
                return jnp.broadcast_to(row, (*level.tokens.shape, row.shape[-1]))

            choices, outputs = jax.tree.map(at_level, (own, outputs_BKD))
            memory = jnp.zeros((B, 1, self.memory_size), dtype)
            if not level.is_root:
                memory = tree.along(level.parents, memories_BFM)
            before = self._read(params, level.tokens, memory)
            new = self.remember(params, outputs, before).astype(dtype)
            memories = lax.dynamic_update_slice_in_dim(memories_BFM, new, level.start, axis=1)
            logits = self.over_target(params, self.corrected(params, choices, outputs, before))
            return logits, outputs, memories

        fed = shapes.num_fed(self.tree, self.num_speculative_tokens)
        memories = jnp.zeros((B, fed, self.memory_size), dtype)
        return sample.grow(self.tree, self.num_speculative_tokens, feed, memories, now)[0]

    def _read(self, params: PyTree, tokens_BT: Array, memory_BTM: Array) -> Array:
        """Returns what `corrected` reads of tokens before slots, and of a memory: [B, T, W]."""
        before = self.before(params, jnp.maximum(tokens_BT, 0))
        return jnp.concatenate([before.astype(memory_BTM.dtype), memory_BTM], axis=-1)

    def unpacked(
        self, params: PyTree, outputs_BTD: Array, depth: int | Array
    ) -> tuple[Array, Array, Array]:
        """Returns the parts of what `unrolled` yields, and the slots' own logits [B, T, R].

        The parts are the outputs of the slots, and what `corrected` reads beside them [B, T, W].
        """
        outputs, before = jnp.split(outputs_BTD, (self.config.d_model,), axis=-1)
        own = sharding.gather_vocab(super().draft_logits(params, outputs, depth))
        return outputs, before, own

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        outputs, before, own = self.unpacked(params, outputs_BTD, depth)
        return self.corrected(params, self.choices(own), outputs, before)

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
        """Yields the outputs of each step, and behind them what the step reads: [B, T, D + W]."""
        arguments = params, next_BT, features_BTD, steps, detached, remat, later, anchors
        index = jnp.arange(next_BT.shape[1]) if anchors is None else anchors
        for step, outputs in enumerate(super().unrolled(*arguments)):
            if step == 0:
                memory = jnp.zeros((*outputs.shape[:2], self.memory_size), outputs.dtype)
            elif step == 1 and later is not None:
                index, memory = later, memory[:, later]
            before = self._read(params, features.entries(next_BT, index + step), memory)
            memory = self.remember(params, outputs, before).astype(outputs.dtype)
            memory = lax.stop_gradient(memory) if detached else memory
            yield jnp.concatenate([outputs, before], axis=-1)
