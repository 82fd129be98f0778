"""Drafters with a decoder layer over all features, each beside the token that follows it."""

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import caches as kv
from spsjax import tree
from spsjax.drafters import features, pending, sample, shapes
from spsjax.models.config import Config
from spsjax.models.layers import Context, KeysValues
from spsjax.types import Array, Block, ModelOutput, PyTree, pytree_dataclass


@pytree_dataclass
class PairState:
    """State of a `PairDrafter`."""

    cache: kv.KVCache  # slot t holds the pair of feature t and token t + 1
    last: Array  # [B, D] output at the last pair, which tells the next token; 0: there is no pair
    pending: pending.Pending


@dataclasses.dataclass(frozen=True)
class PairDrafter(features.FeatureDrafter):
    """Continues the target's features: a layer that reads each with the token that follows it.

    A pair's output stands for the next feature, and is drafted from. The cache holds pairs of the
    target's own features only: what was drafted is dropped when a round ends, and the accepted
    tokens are fed again with the features that the target has made of them.

    Attributes:
        config: shape of the layer.

    Its features are made by `fused` of what is `seen` of the target.
    """

    config: Config
    target: Config
    num_speculative_tokens: int | None = None
    tree: shapes.Shape = None

    @property
    def split_like(self):
        return self.config

    def seen(self, output: ModelOutput) -> Array:
        """Returns [B, T, W], what features are made of. The parts are D wide, as in the target."""
        return output.hidden

    def fused(self, params: PyTree, seen_BTW: Array) -> Array:
        """Returns the features [B, T, D] of what was `seen`."""
        return seen_BTW

    def features(self, params, output):
        return self.fused(params, self.seen(output))

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
        """Returns the outputs [B, T, D] of pairs, and keys and values of the block.

        Args:
            params: parameters of target and drafter.
            tokens_BT: the token after each feature.
            features_BTD: features, the target's own or outputs at earlier pairs.
            context: positions and masks.
            cached: the pairs before the block; empty in training.
            earlier: keys and values of the block before these pairs, if any.
        """

    def init(self, params, batch, slots):
        config = self.config
        dtype = jax.tree.leaves(params["drafter"])[0].dtype
        shape = batch, config.num_kv_heads, slots, config.head_dim
        cache = kv.empty(1, shape, dtype, (None,))
        width = self.target.d_model * max(len(self.tap_layers), 1)
        unread = pending.empty(batch, self.num_speculative_tokens, width, dtype)
        return PairState(cache, jnp.zeros((batch, config.d_model), dtype), unread)

    def prefill(self, params, state, chunk, output):
        pairs = chunk.lengths - 1  # the last token's pair is not known yet
        cache = state.cache.at(chunk.starts)
        unread = dataclasses.replace(state.pending, pairs=pairs)
        state = dataclasses.replace(state, cache=cache, pending=unread)
        return self._extended(params, state, chunk.following, self.features(params, output), pairs)

    def sync(self, params, state, now):
        def extended(state, tokens_BT, seen_BTW, pairs_B):
            features = self.fused(params, seen_BTW)
            return self._extended(params, state, tokens_BT, features, pairs_B)

        return pending.read(state, now, self.num_speculative_tokens + 1, extended)

    def propose(self, params, state, now):
        K, config, cache = self.num_speculative_tokens, self.config, state.cache
        B, num_fed = len(now.lengths), shapes.num_fed(self.tree, K)

        def feed(carry, level):
            """Runs the layer over one level of nodes (`sample.Feed`)."""
            outputs, block = carry
            if level.is_root:  # its pair is the cache's last
                last = state.last[:, None]
                return self.logits(params, last, 0), last, carry
            features = tree.along(level.parents, outputs)
            positions = now.lengths[:, None] - 2 + level.depth
            positions = jnp.broadcast_to(positions, level.tokens.shape)
            above = level.above[:, :, 1:]
            new, grown = self.run(params, level.tokens, features, cache, block, positions, above)
            outputs = lax.dynamic_update_slice_in_dim(outputs, new, level.start, axis=1)
            return self.logits(params, new, level.depth), new, (outputs, grown)

        outputs = jnp.zeros((B, num_fed, config.d_model), state.last.dtype)
        outputs = outputs.at[:, 0].set(state.last)
        shape = B, config.num_kv_heads, num_fed - 1, config.head_dim
        start = outputs, kv.empty_block(1, shape, state.last.dtype)
        return sample.grow(self.tree, K, feed, start, now)[0]

    def commit(self, params, state, now, proposal, output, verdict):
        # The token after each node of the path is what the round has emitted in its place.
        seen = tree.along(verdict.path, self.seen(output))
        unread = pending.add(state.pending, seen, now.lengths - 1, state.cache.lengths)
        return dataclasses.replace(state, pending=unread)

    def _extended(self, params, state, tokens_BT, features_BTD, pairs_B) -> PairState:
        """Returns the state with some pairs behind the cache, of which it keeps `pairs_B`."""
        outputs, block = self.run(params, tokens_BT, features_BTD, state.cache)
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
        """Returns the outputs of pairs and the grown block; arguments as of `transformer.apply`."""

        def outputs(*context):
            return self.outputs(params, tokens_BT, features_BTD, *context)

        return features.run_layer(
            outputs, tokens_BT.shape[1], cache, block, positions_BT, ancestors
        )

    def unrolled(
        self, params, next_BT, features_BTD, steps, detached=False, remat=False, later=None
    ):
        config, (B, T) = self.config, next_BT.shape
        run = jax.checkpoint(self.run) if remat else self.run
        outputs, true = run(params, next_BT, features_BTD, None)
        yield outputs
        # From here on every index is a row of its own, which drafts after its part of the text.
        if later is not None:
            outputs = outputs[:, later]
        index = jnp.arange(T) if later is None else later
        L, lengths = len(index), jnp.tile(index.astype(jnp.int32) + 1, B)
        cache = kv.KVCache(true.keys, true.values, lengths, (None,))
        shape = B * L, config.num_kv_heads, steps - 1, config.head_dim
        own = kv.empty_block(1, shape, outputs.dtype)
        for step in range(1, steps):
            drafted = lax.stop_gradient(outputs) if detached else outputs
            tokens = jnp.take(next_BT, index + step, axis=1, mode="clip")
            rows = tokens.reshape(B * L, 1), drafted.reshape(B * L, 1, -1)
            outputs, own = run(params, *rows, cache, own)
            outputs = outputs.reshape(B, L, -1)
            yield outputs
