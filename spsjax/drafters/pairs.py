"""Base class of drafters with a decoder layer over pairs of a feature and the next token."""

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.drafters import features, pending, sample, shapes
from spsjax.models import caches as kv
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.types import Array, Block, ModelOutput, PyTree, pytree_dataclass


@pytree_dataclass
class PairState:
    """State of a `PairDrafter`."""

    cache: kv.KVCache  # slot t holds the pair of feature t and token t + 1
    last: Array  # [B, D] output at the last pair, from which token 1 is drafted; 0: no pair yet
    pending: pending.Pending


@dataclasses.dataclass(frozen=True)
class PairDrafter(features.FeatureDrafter):
    """Drafts with a layer that reads pairs of a feature and the next token.

    The output at a pair is a prediction of the next feature, from which a token is drafted. The
    cache has pairs with the target's own features only. Pairs of drafted tokens are dropped at the
    end of a round, and accepted tokens are fed again with the features of the target.

    Attributes:
        config: shape of the layer.
    """

    config: Config
    target: Config
    num_speculative_tokens: int | None = None
    tree: shapes.Shape = None

    @property
    def sharding_config(self):
        return self.config

    def raw_features(self, output: ModelOutput) -> Array:
        """Returns the activations [B, T, W] that `fuse` reads: one or several of the target."""
        return output.hidden

    def fuse(self, params: PyTree, raw_BTW: Array) -> Array:
        """Returns the features [B, T, D] from `raw_features`."""
        return raw_BTW

    def features(self, params, output):
        return self.fuse(params, self.raw_features(output))

    @abc.abstractmethod
    def outputs(
        self,
        params: PyTree,
        tokens_BT: Array,
        features_BTD: Array,
        context: Context,
        cached: Sequence[kv.Segment],
        earlier: KeysValues | None,
    ) -> tuple[Array, KeysValues]:
        """Returns the outputs [B, T, D] at pairs, and the keys and values of the block.

        Args:
            params: parameters of target and drafter.
            tokens_BT: token after each feature.
            features_BTD: features of the target, or outputs at earlier pairs.
            context: positions and masks.
            cached: cached pairs before the block; empty in training.
            earlier: keys and values of earlier pairs in the block; None: there are none.
        """

    def init(self, params, batch, slots):
        config = self.config
        dtype = jax.tree.leaves(params["drafter"])[0].dtype
        shape = batch, config.num_kv_heads, slots, config.head_dim
        cache = kv.empty(1, shape, dtype, (None,))
        width = self.target.d_model * max(len(self.tap_layers), 1)
        buffer = pending.empty(batch, self.num_speculative_tokens, width, dtype)
        return PairState(cache, jnp.zeros((batch, config.d_model), dtype), buffer)

    def prefill(self, params, state, chunk, output):
        pairs = chunk.lengths - 1  # the last token has no next token yet
        cache = state.cache.at(chunk.starts)
        buffer = dataclasses.replace(state.pending, pairs=pairs)
        state = dataclasses.replace(state, cache=cache, pending=buffer)
        return self._extend(params, state, chunk.following, self.features(params, output), pairs)

    def sync(self, params, state, now):
        def extend(state, tokens_BT, raw_BTW, pairs_B):
            features = self.fuse(params, raw_BTW)
            return self._extend(params, state, tokens_BT, features, pairs_B)

        return pending.read(state, now, self.num_speculative_tokens + 1, extend)

    def propose(self, params, state, now):
        K, config, cache = self.num_speculative_tokens, self.config, state.cache
        B, num_fed = len(now.lengths), shapes.num_fed(self.tree, K)

        def feed(carry, level):
            """Runs the layer over one level of nodes (`sample.Feed`)."""
            outputs, block = carry
            if level.is_root:  # the root's pair is the last one in the cache, and already read
                last = state.last[:, None]
                return self.logits(params, last, 0), last, carry
            features = tree.along(level.parents, outputs)
            positions = now.lengths[:, None] - 2 + level.depth
            positions = jnp.broadcast_to(positions, level.tokens.shape)
            above = level.above[:, :, 1:]  # the block has no row for the root
            new, grown = self.run(params, level.tokens, features, cache, block, positions, above)
            outputs = lax.dynamic_update_slice_in_dim(outputs, new, level.start, axis=1)
            return self.logits(params, new, level.depth), new, (outputs, grown)

        outputs = jnp.zeros((B, num_fed, config.d_model), state.last.dtype)
        outputs = outputs.at[:, 0].set(state.last)
        shape = B, config.num_kv_heads, num_fed - 1, config.head_dim
        start = outputs, kv.empty_block(1, shape, state.last.dtype)
        return sample.grow(self.tree, K, feed, start, now)[0]

    def commit(self, params, state, now, proposal, output, verdict):
        # Features along the accepted path. `sync` pairs each with the next token of the buffer.
        raw = tree.along(verdict.path, self.raw_features(output))
        buffer = pending.add(state.pending, raw, now.lengths - 1, state.cache.lengths)
        return dataclasses.replace(state, pending=buffer)

    def _extend(self, params, state, tokens_BT, features_BTD, pairs_B) -> PairState:
        """Returns the state after the layer has read more pairs, `pairs_B` in all."""
        outputs, block = self.run(params, tokens_BT, features_BTD, state.cache)
        # A row whose last pair is not among these keeps its output.
        index = pairs_B - 1 - state.cache.lengths
        inside = (index >= 0) & (index < outputs.shape[1])
        index = jnp.clip(index, 0, outputs.shape[1] - 1)[:, None, None]
        last = jnp.take_along_axis(outputs, index, axis=1)[:, 0]
        last = jnp.where(inside[:, None], last, state.last)
        cache = state.cache.write(block, None, pairs_B, outputs)
        return PairState(cache, last, state.pending)

    def run(
        self, params, tokens_BT, features_BTD, cache, block=None, positions_BT=None, ancestors=None
    ) -> tuple[Array, Block]:
        """Returns the outputs at pairs and the extended block; see `transformer.apply`."""

        def outputs(*context):
            return self.outputs(params, tokens_BT, features_BTD, *context)

        return features.run_layer(
            outputs, tokens_BT.shape[1], cache, block, positions_BT, ancestors
        )

    def cache_slots(self, slots: int) -> int:
        return slots

    def step(self, params, tokens_B1, state):
        outputs, block = self.run(params, tokens_B1, state.last[:, None], state.cache)
        return self.logits(params, outputs), block

    def unrolled(
        self, params, next_BT, features_BTD, steps, detached=False, remat=False, later=None
    ):
        config, (B, T) = self.config, next_BT.shape
        run = jax.checkpoint(self.run) if remat else self.run
        outputs, text = run(params, next_BT, features_BTD, None)
        yield outputs
        # In later steps every index is a row of its own, which drafts after its prefix of the text.
        # The rows share one cache of the text's pairs, and differ in its length.
        if later is not None:
            outputs = outputs[:, later]
        index = jnp.arange(T) if later is None else later
        L, lengths = len(index), jnp.tile(index.astype(jnp.int32) + 1, B)
        cache = kv.KVCache(text.keys, text.values, lengths, (None,))
        shape = B * L, config.num_kv_heads, steps - 1, config.head_dim
        block = kv.empty_block(1, shape, outputs.dtype)
        for step in range(1, steps):
            drafted = lax.stop_gradient(outputs) if detached else outputs
            tokens = jnp.take(next_BT, index + step, axis=1, mode="clip")
            rows = tokens.reshape(B * L, 1), drafted.reshape(B * L, 1, -1)
            outputs, block = run(params, *rows, cache, block)
            outputs = outputs.reshape(B, L, -1)
            yield outputs
