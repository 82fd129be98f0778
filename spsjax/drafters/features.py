"""What drafters that read the target's features share.

A feature is what the target has computed of a token, such as its final hidden state. A
`PairDrafter` runs a decoder layer over all features, each beside the token that follows it. A
`StateDrafter` reads the last one only, and a `HeadsDrafter` predicts from it the token of each
depth, whatever comes before.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, Sharding

from spsjax import cache as kv
from spsjax import growth, tree
from spsjax.drafters import base
from spsjax.errors import InputError, check_integer
from spsjax.models.config import Config
from spsjax.models.layers import Context, KeysValues, context_of
from spsjax.parallel import sharding
from spsjax.types import Array, Block, ModelOutput, PyTree, pytree_dataclass


class FeatureDrafter(base.TrainableDrafter):
    """Drafts from the target's features.

    A step takes the feature of a token, or what stands for it, and the token that follows. From its
    outputs the token after that is drafted.

    Attributes:
        target: shape of the target.
        num_speculative_tokens: K. None: 4, or the depth of the tree.
        tree: shape of the tree; None: a chain.
    """

    target: Config

    def __post_init__(self):
        if self.num_speculative_tokens is not None:
            check_integer("num_speculative_tokens", self.num_speculative_tokens, 0)
        vocab = self.target.vocab_size
        K = growth.checked_depth(self.tree, self.num_speculative_tokens, vocab)
        object.__setattr__(self, "num_speculative_tokens", K)

    @property
    def max_steps(self) -> int | None:
        """Steps that it can take after a feature; None: any number."""
        return None

    @property
    @abc.abstractmethod
    def split_like(self) -> Config:
        """Shape of the model by whose sharding rules the weights can be split."""

    def shardings(
        self, mesh: Mesh | None, replicate: bool | None = None
    ) -> Callable[[tuple], Sharding]:
        """Returns a function from a parameter's path to its sharding.

        Args:
            mesh: mesh of the target; None: one device.
            replicate: whether every device holds all weights; None: yes, because for a layer of a
                small model collectives cost more than they save.

        Raises:
            InputError: the mesh does not divide the layer.
        """
        split = mesh is not None and replicate is False
        if split and self.target.d_model % mesh.shape["model"]:
            raise InputError(
                f"d_model: expected a multiple of the mesh's model axis, {mesh.shape['model']}, "
                f"found {self.target.d_model}"
            )
        return sharding.param_shardings(mesh, self.split_like, replicate=not split)

    def from_target(self, weights: PyTree, params: PyTree) -> PyTree:
        """Returns initial weights, of which some are replaced by the target's.

        `params["drafter"]` holds the constants only.
        """
        return weights

    def step_weights(self, params: PyTree) -> PyTree:
        """Returns those of the arrays in `params` that every draft step multiplies with."""
        return params["drafter"]

    @abc.abstractmethod
    def features(self, params: PyTree, output: ModelOutput) -> Array:
        """Returns the features [B, T, D] of what the target has read."""

    @abc.abstractmethod
    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        """Returns the logits [B, T, R] of the draft's tokens, from a step's outputs."""

    def draft_ids(self, params: PyTree) -> Array | None:
        """Returns the target's ids [R] of the draft's tokens; None: they are the target's."""
        return None

    def logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        """Returns the logits [B, T, V] of the next token, from the outputs of a step.

        The first step after the last committed token has depth 0.
        """
        logits = sharding.gather_vocab(self.draft_logits(params, outputs_BTD, depth))
        ids = self.draft_ids(params)
        if ids is None:
            return logits
        # What is never drafted gets probability 0. (An infinity would be reported as one.)
        shape, least = (*logits.shape[:2], self.target.vocab_size), jnp.finfo(logits.dtype).min
        lowest = jnp.full(shape, least / 2, logits.dtype)
        return lowest.at[..., ids].set(logits)

    @abc.abstractmethod
    def unrolled(
        self,
        params: PyTree,
        next_BT: Array,
        features_BTD: Array,
        steps: int,
        detached: bool = False,
        remat: bool = False,
        later: Array | None = None,
    ) -> Iterator[Array]:
        """Yields the outputs of each step of the drafts that begin everywhere in texts.

        In step i, index t stands for a draft that began after feature t, with the text's tokens
        t + 2 to t + 1 + i as its tokens. It sees what `propose` sees. The last i indices have no
        such tokens, and garbage.

        Outputs are [B, T, D] of all indices in the first step, and [B, L, D] of the indices `later`
        [L] from then on; None: of all.

        Args:
            params: parameters of target and drafter.
            next_BT: the token that follows each feature.
            features_BTD: the target's features of the texts.
            steps: number of steps.
            detached: whether gradients stop between steps.
            remat: whether each step is computed again in the backward pass.
            later: indices that go on after the first step.
        """


@pytree_dataclass
class PairState:
    """State of a `PairDrafter`."""

    cache: kv.KVCache  # slot t holds the pair of feature t and token t + 1
    last: Array  # [B, D] output at the last pair, which tells the next token; 0: there is no pair


@dataclasses.dataclass(frozen=True)
class PairDrafter(FeatureDrafter):
    """Continues the target's features: a layer that reads each with the token that follows it.

    A pair's output stands for the next feature, and is drafted from. The cache holds pairs of the
    target's own features only: what was drafted is dropped when a round ends, and the accepted
    tokens are fed again with the features that the target has made of them.

    Attributes:
        config: shape of the layer.
    """

    config: Config
    target: Config
    num_speculative_tokens: int | None = None
    tree: growth.Shape = None

    @property
    def split_like(self):
        return self.config

    @abc.abstractmethod
    def outputs(
        self,
        params: PyTree,
        tokens_BT: Array,
        features_BTD: Array,
        context: Context,
        cache: kv.Segment | None,
        earlier: KeysValues | None,
    ) -> tuple[Array, KeysValues]:
        """Returns the outputs [B, T, D] of pairs, and keys and values of the block.

        Args:
            params: parameters of target and drafter.
            tokens_BT: the token after each feature.
            features_BTD: features, the target's own or outputs at earlier pairs.
            context: positions and masks.
            cache: the pairs before the block; None in training.
            earlier: keys and values of the block before these pairs, if any.
        """

    def init(self, params, batch, slots):
        config = self.config
        dtype = jax.tree.leaves(params["drafter"])[0].dtype
        shape = batch, config.num_kv_heads, slots, config.head_dim
        cache = kv.empty(1, shape, dtype, (None,))
        return PairState(cache, jnp.zeros((batch, config.d_model), dtype))

    def prefill(self, params, state, tokens_BT, next_BT, starts_B, lengths_B, output):
        features = self.features(params, output)
        state = dataclasses.replace(state, cache=state.cache.at(starts_B))
        return self._extended(params, state, next_BT, features, lengths_B - 1)

    def propose(self, params, state, tokens_BS, lengths_B, rows, keys_B):
        K, config, cache = self.num_speculative_tokens, self.config, state.cache
        B, num_fed = len(lengths_B), growth.num_fed(self.tree, K)
        fed = jnp.arange(num_fed)

        def feed(carry, tokens_BT, depth, above):
            """Runs the layer over one level of nodes (`growth.Feed`)."""
            outputs, block = carry
            if isinstance(depth, int) and depth == 0:  # the root's pair is the cache's last
                return self.logits(params, state.last[:, None], depth), carry
            earlier = above & (fed <= block.size)  # the root and what is in the block
            parent = jnp.max(jnp.where(earlier, fed, 0), axis=2)
            parent = jnp.broadcast_to(parent, tokens_BT.shape)
            features = jnp.take_along_axis(outputs, parent[..., None], axis=1)
            positions = jnp.broadcast_to(lengths_B[:, None] - 2 + depth, tokens_BT.shape)
            new, grown = self.run(
                params, tokens_BT, features, cache, block, positions, above[:, :, 1:]
            )
            outputs = lax.dynamic_update_slice_in_dim(outputs, new, block.size + 1, axis=1)
            return self.logits(params, new, depth), (outputs, grown)

        outputs = jnp.zeros((B, num_fed, config.d_model), state.last.dtype)
        outputs = outputs.at[:, 0].set(state.last)
        shape = B, config.num_kv_heads, num_fed - 1, config.head_dim
        start = outputs, kv.empty_block(1, shape, state.last.dtype)
        root = jnp.take_along_axis(tokens_BS, lengths_B[:, None] - 1, axis=1)[:, 0]
        proposal, _, _ = growth.grow(self.tree, K, feed, start, root, rows, keys_B)
        return proposal, state

    def commit(self, params, state, tokens_BS, lengths_B, proposal, output, verdict):
        features = tree.along(verdict.path, self.features(params, output))
        # The token after each node of the path is what the round emitted in its place.
        return self._extended(params, state, verdict.tokens, features, lengths_B - 1)

    def _extended(self, params, state, tokens_BT, features_BTD, lengths_B) -> PairState:
        """Returns the state with some pairs behind the cache, of which it keeps `lengths_B`."""
        outputs, block = self.run(params, tokens_BT, features_BTD, state.cache)
        index = lengths_B - 1 - state.cache.lengths
        inside = (index >= 0) & (index < outputs.shape[1])
        index = jnp.clip(index, 0, outputs.shape[1] - 1)[:, None, None]
        found = jnp.take_along_axis(outputs, index, axis=1)[:, 0]
        last = jnp.where(inside[:, None], found, state.last)
        return PairState(state.cache.write(block, None, lengths_B, outputs), last)

    def run(
        self, params, tokens_BT, features_BTD, cache, block=None, positions_BT=None, ancestors=None
    ) -> tuple[Array, Block]:
        """Returns the outputs of pairs and the grown block; arguments as of `transformer.apply`."""
        context = context_of(tokens_BT.shape[1], cache, block, positions_BT, ancestors)
        segment = None if cache is None else cache.segments()[0]
        earlier = None if block is None else (block.keys[0], block.values[0])
        outputs, rows = self.outputs(params, tokens_BT, features_BTD, context, segment, earlier)
        return outputs, context.block([rows])

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


@dataclasses.dataclass(frozen=True)
class StateDrafter(FeatureDrafter):
    """Drafts from the last feature, the target's final hidden state, without attention.

    The state of a row is the feature [B, D] of its last but one token, from which the target drew
    the last; 0 if there is none.
    """

    target: Config
    num_speculative_tokens: int | None = None
    tree: growth.Shape = None

    @property
    def split_like(self):
        return self.target

    def features(self, params, output):
        return output.hidden

    def init(self, params, batch, slots):
        dtype = jax.tree.leaves(params["drafter"])[0].dtype
        return jnp.zeros((batch, self.target.d_model), dtype)

    def prefill(self, params, state, tokens_BT, next_BT, starts_B, lengths_B, output):
        return _replaced(state, output.hidden, lengths_B - 2 - starts_B)

    def commit(self, params, state, tokens_BS, lengths_B, proposal, output, verdict):
        return _replaced(state, tree.along(verdict.path, output.hidden), verdict.num_tokens - 1)


def _replaced(state_BD: Array, features_BTD: Array, index_B: Array) -> Array:
    """Returns the features at some indices, where these exist, and else the state."""
    T = features_BTD.shape[1]
    index = jnp.clip(index_B, 0, T - 1)[:, None, None]
    found = jnp.take_along_axis(features_BTD, index, axis=1)[:, 0].astype(state_BD.dtype)
    return jnp.where(((index_B >= 0) & (index_B < T))[:, None], found, state_BD)


@dataclasses.dataclass(frozen=True)
class HeadsDrafter(StateDrafter):
    """Drafts with one head per depth, which does not see the tokens before.

    Attributes:
        num_heads: H; K is at most H. K is H, or the depth of the tree, if it is None.
    """

    num_heads: int = 4

    def __post_init__(self):
        check_integer("num_heads", self.num_heads, 1)
        if self.num_speculative_tokens is None and self.tree is None:
            object.__setattr__(self, "num_speculative_tokens", self.num_heads)
        super().__post_init__()
        if self.num_speculative_tokens > self.num_heads:
            raise InputError(
                f"num_speculative_tokens: expected at most one for each of {self.num_heads} heads, "
                f"found {self.num_speculative_tokens}"
            )

    @property
    def max_steps(self):
        return self.num_heads

    @property
    @abc.abstractmethod
    def shares_head(self) -> bool:
        """Whether all heads have the same vocabulary matrix."""

    @abc.abstractmethod
    def outputs(self, params: PyTree, features_BTD: Array, depth: int) -> Array:
        """Returns what the head of a depth makes of features: [B, T, D]."""

    def propose(self, params, state, tokens_BS, lengths_B, rows, keys_B):
        K = self.num_speculative_tokens
        outputs = [self.outputs(params, state[:, None], depth) for depth in range(K)]
        if self.shares_head:  # its matrix is read once
            logits_BKV = self.logits(params, jnp.concatenate(outputs, axis=1))
        else:
            logits = [self.logits(params, each, depth) for depth, each in enumerate(outputs)]
            logits_BKV = jnp.concatenate(logits, axis=1)

        def feed(state, tokens_BT, depth, above):
            """Returns the logits of one level of nodes, which are all the same."""
            row = lax.dynamic_slice_in_dim(logits_BKV, depth, 1, axis=1)
            return jnp.broadcast_to(row, (*tokens_BT.shape, row.shape[-1])), state

        root = jnp.take_along_axis(tokens_BS, lengths_B[:, None] - 1, axis=1)[:, 0]
        proposal, _, _ = growth.grow(self.tree, K, feed, (), root, rows, keys_B)
        return proposal, state

    def unrolled(
        self, params, next_BT, features_BTD, steps, detached=False, remat=False, later=None
    ):
        run = jax.checkpoint(self.outputs, static_argnums=2) if remat else self.outputs
        for depth in range(steps):
            if depth == 1 and later is not None:
                features_BTD = features_BTD[:, later]
            yield run(params, features_BTD, depth)
