"""Base class of block drafters, which read a block of mask tokens in one pass.

The block is the last committed token, the *anchor*, and a mask token in each slot behind it. Its
layers attend to the target's features of all tokens before the anchor, whose keys and values are
cached per layer, and to the whole block. DFlash (Chen et al. 2026, 2602.06036) is the plain form.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from spsjax.drafters import base, features, pairs, pending, sample
from spsjax.errors import InputError, short_repr
from spsjax.models import caches as kv
from spsjax.models import transformer
from spsjax.models.attention import capped
from spsjax.models.context import context_of
from spsjax.models.layers import DecoderBlock, Norm
from spsjax.models.linear import make_linear
from spsjax.parallel import sharding
from spsjax.types import Array, Block, Proposal, PyTree, Round, pytree_dataclass
from spsjax.utils.fields import flag, integer, number
from spsjax.utils.from_config import build

CAUSAL = "none", "windows", "all"


class Backbone(nnx.Module):
    """Decoder layers over the target's features and a block of tokens."""

    def __init__(self, drafter: "BlockDrafter", *, dtype, rngs: nnx.Rngs):
        self.drafter, config, width = drafter, drafter.config, drafter.target.d_model
        inputs = len(drafter.tap_layers) * width
        self.fc = make_linear(inputs, config.d_model, False, dtype=dtype, rngs=rngs)
        self.hidden_norm = Norm(config, config.d_model, dtype=dtype)
        layers = range(config.num_layers)
        self.layers = nnx.List([self.make_layer(drafter, dtype, rngs) for _ in layers])
        self.norm = Norm(config, config.d_model, dtype=dtype)

    def make_layer(self, drafter: "BlockDrafter", dtype, rngs: nnx.Rngs) -> DecoderBlock:
        """Returns a new layer."""
        return DecoderBlock(drafter.config, dtype=dtype, rngs=rngs)

    def fuse(self, taps_BTW: Array) -> Array:
        """Returns features [B, T, D] from the concatenated inputs of the target's tapped layers."""
        return self.hidden_norm(self.fc(sharding.whole_rows(taps_BTW)))

    def read(self, features_BTD: Array, cache: kv.KVCache | None) -> Block:
        """Returns the keys and values of features as a block, for positions after the cache.

        The features are the same for all layers, and are not normalised per layer.
        """
        context = context_of(features_BTD.shape[1], cache)
        rows = [
            context.append(None, *layer.attention.keys_values(features_BTD, context, index))
            for index, layer in enumerate(self.layers)
        ]
        return context.block(rows, len(features_BTD))

    def __call__(self, x_BPD: Array, cache: kv.KVCache) -> Array:
        """Returns the normalised outputs [B, P, D] of a block that follows the cache."""
        slots = jnp.arange(x_BPD.shape[1])
        earlier = (slots <= slots[:, None])[None]
        masks = earlier | True, earlier
        contexts = [context_of(len(slots), cache, ancestors=mask) for mask in masks]
        segments = cache.segments()
        for index, layer in enumerate(self.layers):
            context = contexts[self.drafter.is_causal(index)]
            x_BPD, _ = layer(x_BPD, context, segments[index], None, index)
        return self.norm(x_BPD)


@pytree_dataclass
class BlockState:
    """State of a `BlockDrafter`."""

    cache: kv.KVCache  # keys and values of the features of all tokens before the anchor, per layer
    pending: pending.Pending


@dataclasses.dataclass(frozen=True)
class BlockDrafter(pairs.LayerDrafter):
    """Drafts with layers over the target's features and a block of mask tokens.

    Attributes:
        config: shape of the layers.
        tap_layers: layers of the target whose inputs are read.
        block_size: number of slots, the anchor's included. The block is always whole, also for a
            smaller K: each slot attends to all of them, and the weights were trained so.
        mask_token_id: id of the token in the slots behind the anchor, which may be in the padding
            of the target's vocabulary.
        anchor_drafts: whether the anchor's own slot drafts the first token. Else the slot behind it
            does, and slot i drafts the token of its own position.
        causal: layers whose slots attend to earlier slots only: "none", those with a window
            ("windows"), or "all".
        embed_scale: factor of the embeddings of the block.
        output_scale: factor of the logits.
        softcap: limit c in c tanh(x / c) for the logits; 0: none. The target's own limit does not
            apply.
    """

    tap_layers: tuple[int, ...] = (2, 16, 29)
    block_size: int = integer(16, 2)
    mask_token_id: int = integer(0)
    anchor_drafts: bool = flag(False)
    causal: str = "none"
    embed_scale: float = number(1.0, above=True)
    output_scale: float = number(1.0, above=True)
    softcap: float = number(0.0)

    module = Backbone
    steps_name = "drafting slots"

    def __post_init__(self):
        super().__post_init__()
        features.check_taps(self.tap_layers, self.target)
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
    def from_config(cls, options, target):
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
    def max_steps(self):
        return self.block_size - (not self.anchor_drafts)

    @property
    def least_steps(self):
        return 1

    @property
    def module_config(self):
        return self

    def is_causal(self, layer: int) -> bool:
        """Returns whether the slots of a layer attend to earlier slots only."""
        return self.causal == "all" or (self.causal == "windows" and self.config.window(layer) > 0)

    def passes(self, params):
        own, K = params["drafter"], self.num_speculative_tokens
        attentions = [layer["attention"] for layer in own["layers"].values()]
        reading = own["fc"], [(weights["key"], weights["value"]) for weights in attentions]
        return {
            "draft": base.Pass(own["layers"], tokens=self.block_size, reads_cache=True),
            "logits": base.Pass(self.head_weights(params), tokens=K),
            "features": base.Pass(reading, tokens=K + 1, phase="sync"),
        }

    def raw_features(self, output):
        return jnp.concatenate(output.taps, axis=-1)

    def fuse(self, params, raw_BTW):
        return self.bind(params).fuse(raw_BTW.astype(self.dtype(params)))

    def init(self, params, batch, slots):
        return BlockState(*self.empty(params, batch, slots, self.config.num_layers))

    def extend(self, params, state, tokens_BT, features_BTD, starts_B, pairs_B):
        cache = state.cache.at(starts_B)
        block = self.bind(params).read(features_BTD, cache)
        return BlockState(cache.write(block, None, pairs_B, features_BTD), state.pending)

    def run(self, params: PyTree, anchors_B: Array, cache: kv.KVCache) -> Array:
        """Returns the outputs [B, P, D] of the slots of blocks that follow the cache."""
        size = len(anchors_B), self.block_size - 1
        masks = jnp.full(size, self.mask_token_id, anchors_B.dtype)
        tokens_BP = jnp.concatenate([anchors_B[:, None], masks], axis=1)
        # The mask token may be in the padding of the vocabulary, which `embed` would clip.
        padded = dataclasses.replace(self.target, vocab_size=self.target.vocab_rows)
        embedded = transformer.embed(padded, params["target"], tokens_BP)
        embedded = embedded.astype(self.dtype(params))
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

    def draft_logits(self, params, outputs_BTD, depth=0):
        weights = params["target"]
        uncapped = dataclasses.replace(self.target, logit_softcap=0.0)
        outputs = outputs_BTD.astype(weights["norm"]["scale"].dtype)
        logits = transformer.head(uncapped, weights, outputs)
        return capped(logits * self.output_scale, self.softcap)

    def training_passes(self, steps, first, later):
        return self.block_size * first

    def unrolled(
        self,
        params,
        next_BT,
        features_BTD,
        steps,
        detached=False,
        remat=False,
        later=None,
        anchors=None,
    ):
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
    its slot by an embedding of the token before. So a token's distribution is conditional on the
    draft tokens before it, and the ratio of acceptance is exact.
    """

    @abc.abstractmethod
    def before(self, params: PyTree, tokens_BT: Array) -> Array:
        """Returns the embeddings [B, T, R] of tokens before a slot."""

    def choices(self, logits_BTV: Array) -> PyTree:
        """Returns what `corrected` reads of slots' own logits, as arrays [B, T, ...]."""
        return logits_BTV

    @abc.abstractmethod
    def corrected(
        self, params: PyTree, choices: PyTree, outputs_BTD: Array, before_BTR: Array
    ) -> Array:
        """Returns the logits [B, T, V] of slots after the tokens before them.

        Args:
            params: parameters of target and drafter.
            choices: result of `choices` for the slots.
            outputs_BTD: outputs of the slots.
            before_BTR: embeddings of the tokens before (`before`).
        """

    @abc.abstractmethod
    def correcting(self, weights: PyTree) -> PyTree:
        """Returns the arrays among the drafter's weights that `corrected` multiplies with."""

    def passes(self, params):
        weights, K = self.correcting(params["drafter"]), self.num_speculative_tokens
        return super().passes(params) | {"corrections": base.Pass(weights, times=K)}

    def propose(self, params, state, now):
        return self.drafted(params, self.slots(params, state, now.root), now)

    def drafted(self, params: PyTree, outputs_BKD: Array, now: Round) -> Proposal:
        """Returns tokens that are drawn one by one from the corrected logits of their slots."""
        own = self.choices(sharding.gather_vocab(super().draft_logits(params, outputs_BKD)))

        def feed(state, level):
            """Corrects the logits of the slot of a level (`sample.Feed`)."""

            def at_level(array):
                row = lax.dynamic_slice_in_dim(array, level.depth, 1, axis=1)
                return jnp.broadcast_to(row, (*level.tokens.shape, row.shape[-1]))

            choices, outputs = jax.tree.map(at_level, (own, outputs_BKD))
            before = self.before(params, jnp.maximum(level.tokens, 0))
            return self.corrected(params, choices, outputs, before), outputs, state

        return sample.grow(self.tree, self.num_speculative_tokens, feed, (), now)[0]

    def unpacked(
        self, params: PyTree, outputs_BTD: Array, depth: int
    ) -> tuple[Array, Array, Array]:
        """Returns the parts of what `unrolled` yields, and the slots' own logits [B, T, V].

        The parts are the outputs of the slots, and the embeddings of the tokens before them.
        """
        outputs, before = jnp.split(outputs_BTD, (self.config.d_model,), axis=-1)
        own = sharding.gather_vocab(super().draft_logits(params, outputs, depth))
        return outputs, before, own

    def draft_logits(self, params, outputs_BTD, depth=0):
        outputs, before, own = self.unpacked(params, outputs_BTD, depth)
        return self.corrected(params, self.choices(own), outputs, before)

    def unrolled(
        self,
        params,
        next_BT,
        features_BTD,
        steps,
        detached=False,
        remat=False,
        later=None,
        anchors=None,
    ):
        """Yields the outputs of each step, and behind them the embedding of the token before."""
        arguments = params, next_BT, features_BTD, steps, detached, remat, later, anchors
        index = jnp.arange(next_BT.shape[1]) if anchors is None else anchors
        for step, outputs in enumerate(super().unrolled(*arguments)):
            index = later if step == 1 and later is not None else index
            tokens = features.entries(next_BT, index + step)
            before = self.before(params, tokens).astype(outputs.dtype)
            yield jnp.concatenate([outputs, before], axis=-1)


def default_tap_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns `count` layers of the target, evenly spaced, from a low to a high one.

    They are the authors' choice. For targets of fewer than 12 layers the highest one is the final
    state, because lower layers predict the next token less well.
    """
    last = num_layers - 2 if num_layers >= 12 else num_layers
    first = min(2, last)
    if count == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))
