"""Base classes of drafters with a decoder layer over pairs of a feature and the next token."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.drafters import base, features, pending, sample, shapes
from spsjax.drafters.choices import Choices
from spsjax.drafters.sample import Level
from spsjax.errors import InputError
from spsjax.models import caches as kv
from spsjax.models import config_checks, transformer
from spsjax.models.caches import KVCache
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues, context_of
from spsjax.types import (
    Array,
    Block,
    Chunk,
    ModelOutput,
    Proposal,
    PyTree,
    Round,
    Verdict,
    pytree_dataclass,
)
from spsjax.utils.fields import derived
from spsjax.utils.from_config import build


@dataclasses.dataclass(frozen=True)
class LayerDrafter(features.FeatureDrafter):
    """Drafts with a decoder layer over pairs of a feature and the next token.

    The state has a `cache`, of which slot t holds the pair of feature t and token t + 1, and the
    `pending` features. The cache has pairs with the target's own features only.

    Attributes:
        config: shape of the layer.
        own_width: whether the layer may have another width than the target.
        fusing: names of the weights that `fuse` reads.
    """

    own_width: ClassVar[bool] = False
    fusing: ClassVar[tuple[str, ...]] = ()
    config: Config
    target: Config
    num_speculative_tokens: int = derived()
    tree: shapes.Shape = None

    def __post_init__(self) -> None:
        super().__post_init__()
        config_checks.refuse_recurrent("drafter", self.config)
        if self.config.d_model != self.target.d_model and not self.own_width:
            raise InputError(
                f"d_model: expected the target's {self.target.d_model}, found {self.config.d_model}"
            )

    @classmethod
    def from_config(cls, options: Mapping[str, Any], target: Config) -> Self:
        """Returns the drafter of a config. Sizes that are 0 or missing are the target's."""
        others = dict(options)
        layer = layer_config(others, target, num_layers=1)
        return build("drafter", cls, others, config=layer, target=target)

    @property
    def sharding_config(self) -> Config:
        return self.config

    @property
    def module_config(self) -> Hashable:
        return self.config

    def raw_features(self, output: ModelOutput) -> Array:
        """Returns the activations [B, T, W] that `fuse` reads: one or several of the target."""
        return output.hidden

    def fuse(self, params: PyTree, raw_BTW: Array) -> Array:
        """Returns the features [B, T, D] from `raw_features`."""
        return raw_BTW

    def features(self, params: PyTree, output: ModelOutput) -> Array:
        return self.fuse(params, self.raw_features(output))

    def cache_slots(self, slots: int) -> int:
        """Returns the number of slots of the drafter's cache for token buffers of `slots`."""
        return slots

    def empty(
        self, params: PyTree, batch: int, slots: int, num_layers: int = 1
    ) -> tuple[kv.KVCache, pending.Pending]:
        """Returns the cache and the buffer of a state before any token."""
        dtype, K = self.dtype(params), self.num_speculative_tokens
        width = self.target.d_model * max(len(self.tap_layers), 1)
        cache = kv.empty(kv.shapes(self.config, batch, slots)[:num_layers], dtype)
        return cache, pending.empty(batch, K, width, dtype)

    @abc.abstractmethod
    def extend(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BT: Array,
        features_BTD: Array,
        starts_B: Array,
        pairs_B: Array,
    ) -> PyTree:
        """Returns the state after the layer has read pairs from `starts_B` on, `pairs_B` in all."""

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        pairs = chunk.lengths - 1  # the last token has no next token yet
        ends = jnp.minimum(pairs, chunk.starts + chunk.tokens.shape[1])
        state = dataclasses.replace(state, pending=dataclasses.replace(state.pending, pairs=pairs))
        features_BTD = self.features(params, output)
        return self.extend(params, state, chunk.following, features_BTD, chunk.starts, ends)

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        def extend(state: PyTree, tokens_BT: Array, raw_BTW: Array, pairs_B: Array) -> PyTree:
            features_BTD, starts = self.fuse(params, raw_BTW), state.cache.lengths
            return self.extend(params, state, tokens_BT, features_BTD, starts, pairs_B)

        return pending.read(state, now, self.num_speculative_tokens + 1, extend)

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        # Features along the accepted path. `sync` pairs each with the next token of the buffer.
        raw = tree.along(verdict.path, self.raw_features(output))
        buffer = pending.add(state.pending, raw, now.lengths - 1, state.cache.lengths)
        return dataclasses.replace(state, pending=buffer)


@pytree_dataclass
class PairState:
    """State of a `PairDrafter`."""

    cache: kv.KVCache  # slot t holds the pair of feature t and token t + 1
    last: Array  # [B, D] output at the last pair, from which token 1 is drafted; 0: no pair yet
    pending: pending.Pending


@dataclasses.dataclass(frozen=True)
class PairDrafter(LayerDrafter):
    """Drafts with a layer that reads pairs of a feature and the next token.

    The output at a pair is a prediction of the next feature, from which a token is drafted. Pairs
    of drafted tokens are dropped at the end of a round, and accepted tokens are fed again with the
    features of the target.

    The module maps embeddings of tokens, features or outputs at earlier pairs [B, T, D], a context,
    cached pairs before the block, and the block's earlier keys and values (None: there are none) to
    the outputs [B, T, D], and to the keys and values of the block.
    """

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        cache, buffer = self.empty(params, batch, slots)
        return PairState(cache, jnp.zeros((batch, self.config.d_model), self.dtype(params)), buffer)

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
        outputs, block = self.run(params, tokens_BT, features_BTD, cache)
        # A row whose last pair is not among these keeps its output.
        last = features.at_index(state.last, outputs, pairs_B - 1 - starts_B)
        return PairState(cache.write(block, None, pairs_B, outputs), last, state.pending)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        K, config, cache = self.num_speculative_tokens, self.config, state.cache
        B, num_fed = len(now.lengths), shapes.num_fed(self.tree, K)

        def feed(carry: PyTree, level: Level) -> tuple[Choices, Array | None, PyTree]:
            """Runs the layer over one level of nodes (`sample.Feed`)."""
            outputs, block = carry
            if level.is_root:  # the root's pair is the last one in the cache, and already read
                last = state.last[:, None]
                return self.choices(params, last, 0), last, carry
            features = tree.along(level.parents, outputs)
            positions = now.lengths[:, None] - 2 + level.depth
            positions = jnp.broadcast_to(positions, level.tokens.shape)
            above = level.above[:, :, 1:]  # the block has no row for the root
            new, grown = self.run(params, level.tokens, features, cache, block, positions, above)
            outputs = lax.dynamic_update_slice_in_dim(outputs, new, level.start, axis=1)
            return self.choices(params, new, level.depth), new, (outputs, grown)

        outputs = jnp.zeros((B, num_fed, config.d_model), state.last.dtype)
        outputs = outputs.at[:, 0].set(state.last)
        start = outputs, kv.empty_block(kv.shapes(config, B, num_fed - 1), state.last.dtype)
        return sample.grow(self.tree, K, feed, start, now)[0]

    def run(
        self,
        params: PyTree,
        tokens_BT: Array,
        features_BTD: Array,
        cache: KVCache | None,
        block: Block | None = None,
        positions_BT: Array | None = None,
        ancestors: Array | None = None,
    ) -> tuple[Array, Block]:
        """Returns the outputs at pairs and the extended block; see `transformer.apply`."""
        dtype, T = self.dtype(params), tokens_BT.shape[1]
        embedded = transformer.embed(self.target, params["target"], tokens_BT).astype(dtype)
        layer = functools.partial(self.bind(params), embedded, features_BTD.astype(dtype))
        return run_layer(layer, T, cache, block, positions_BT, ancestors)

    def passes(self, params: PyTree) -> dict[str, base.Pass]:
        # The first token is drafted from the output at the last pair, which `sync` has read. So
        # these are K reads of the layer, of which one is a pass of `sync` over several pairs.
        K, own = self.num_speculative_tokens, params["drafter"]
        others = *self.fusing, *self.constants
        layer = {name: own[name] for name in own if name not in others}
        weights = layer, self.head_weights(params)
        fusing = {name: own[name] for name in self.fusing if name in own}
        return {
            "draft": base.Pass(weights, times=K, reads_cache=True),
            "features": base.Pass(fusing, tokens=K + 1, phase="sync"),
        }

    def training_passes(self, steps: int, first: float, later: float) -> float:
        return 1 + (steps - 1) * later  # the first step reads the whole text

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
        config, (B, T) = self.config, next_BT.shape
        run = jax.checkpoint(self.run) if remat else self.run
        outputs, text = run(params, next_BT, features_BTD, None)
        index = jnp.arange(T)
        if anchors is not None:
            index, outputs = anchors, features.entries(outputs, anchors)
        yield outputs
        # In later steps every index is a row of its own, which drafts after its prefix of the text.
        # The rows share one cache of the text's pairs, and differ in its length.
        if later is not None:
            index, outputs = later, outputs[:, later]
        L, lengths = index.shape[-1], features.lengths_before(index, B)
        cache = kv.KVCache(text.keys, text.values, lengths, (None,))
        block = kv.empty_block(kv.shapes(config, B * L, steps - 1), outputs.dtype)
        for step in range(1, steps):
            drafted = lax.stop_gradient(outputs) if detached else outputs
            tokens = features.entries(next_BT, index + step)
            rows = tokens.reshape(B * L, 1), drafted.reshape(B * L, 1, -1)
            outputs, block = run(params, *rows, cache, block)
            outputs = outputs.reshape(B, L, -1)
            yield outputs


def layer_config(options: dict, target: Config, **more: Any) -> Config:
    """Takes the sizes of layers out of options, and returns the shape of the layers.

    Sizes that are 0 or missing are the target's. `more` are further fields of the shape.
    """
    sizes = {
        field: options.pop(field, 0) or getattr(target, field)
        for field in ("d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")
    }
    shared = {
        field: getattr(target, field)
        for field in ("vocab_size", "max_positions", "rope_theta", "norm_eps")
    }
    return build("drafter", Config, sizes, **shared, **more)


def run_layer(
    outputs: Callable[[Context, Sequence[kv.Segment], KeysValues | None], tuple[Array, KeysValues]],
    num_tokens: int,
    cache: kv.KVCache | None,
    block: Block | None,
    positions_BT: Array | None,
    ancestors: Array | None,
) -> tuple[Array, Block]:
    """Returns the outputs of one layer and the extended block.

    The arguments are those of `transformer.apply`; `outputs` applies the layer.
    """
    context = context_of(num_tokens, cache, block, positions_BT, ancestors)
    cached = () if cache is None else cache.segments()[0]
    earlier = None if block is None else (block.keys[0], block.values[0])
    result, rows = outputs(context, cached, earlier)
    return result, context.block([rows], len(result))
