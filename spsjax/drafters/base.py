"""The interface of drafters."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, Sharding

from spsjax import cache as kv
from spsjax import growth, tree
from spsjax.errors import InputError, check_integer
from spsjax.models.config import Config
from spsjax.models.layers import Context, KeysValues, context_of
from spsjax.parallel import sharding
from spsjax.sampling import RowParams
from spsjax.types import (
    Array,
    Block,
    ModelOutput,
    Proposal,
    PyTree,
    Verdict,
    pytree_dataclass,
)


class Drafter(abc.ABC):
    """Proposes tokens that the target then verifies: four pure functions over pytrees.

    A concrete drafter is a final, frozen, hashable dataclass: it is a static argument of the jitted
    loop. It holds no arrays: parameters and state are arguments. Any drafter leaves the output's
    distribution untouched, because acceptance is the verifier's business. What it must get right is
    that `Proposal.probs` are the distributions from which its tokens were drawn.

    In all functions `params` is `{"target": ..., "drafter": ...}`. A row's committed tokens are its
    first `lengths_B`; after them there may be any token at all. Every leaf of a state has a batch
    axis first, unless it is in a `KVCache`.

    Attributes:
        num_speculative_tokens: K, the most tokens that a round can accept.
        tree: shape of the trees that it grows; None: a chain, or trees that it makes itself.
        num_nodes: N, draft tokens of a proposal; K for a chain.
        trees: whether proposals are trees, which not every verifier takes.
        tap_layers: layers of the target whose input `prefill` and `commit` want to see.
        score_sizes: numbers of draft tokens, beside N, for which a smaller scoring pass is
            compiled; for drafters that often propose fewer than N.
    """

    num_speculative_tokens: int
    tree: growth.Shape = None
    tap_layers: tuple[int, ...] = ()
    score_sizes: tuple[int, ...] = ()

    @property
    def trees(self) -> bool:
        return self.tree is not None

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes if self.tree else self.num_speculative_tokens

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        """Returns the state before any token, with room for `slots` tokens per row."""
        return ()

    def prefill(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BT: Array,
        next_BT: Array,
        starts_B: Array,
        lengths_B: Array,
        output: ModelOutput,
    ) -> PyTree:
        """Returns the state after one more chunk of the prompts.

        Chunks come in order. The last one may repeat tokens of the one before, and a chunk has
        padding behind shorter prompts.

        Args:
            params: parameters of target and drafter.
            state: state after the chunks before.
            tokens_BT: the chunk.
            next_BT: the token that follows each of its tokens.
            starts_B: position of the chunk's first token per row.
            lengths_B: lengths of the whole prompts. Their last token counts as not fed yet: it is
                the root of the first round.
            output: what the target made of the chunk.
        """
        return state

    @abc.abstractmethod
    def propose(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BS: Array,
        lengths_B: Array,
        rows: RowParams,
        keys_B: Array,
    ) -> tuple[Proposal, PyTree]:
        """Returns draft tokens, drawn with `sampling.uniforms` of the role DRAFT, and a state.

        The state may carry what `commit` needs beyond what a state has between rounds.
        """

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BS: Array,
        lengths_B: Array,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        """Returns the state after a verdict, equal to that of a fresh prefill.

        Args:
            params: parameters of target and drafter.
            state: state that `propose` returned.
            tokens_BS: token buffer with the verdict's tokens.
            lengths_B: committed tokens per row, those of the verdict included.
            proposal: the round's proposal.
            output: what the target made of the proposal's nodes.
            verdict: what was accepted.
        """
        return state


def check_proposal(drafter: Drafter, result, batch: int, vocab: int) -> tuple[Proposal, PyTree]:
    """Returns what `propose` returned: a proposal and a state.

    Raises InputError, when traced, for a proposal whose types or shapes do not fit the drafter, the
    batch or the target's vocabulary.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Proposal):
        raise InputError(
            f"drafter: expected propose to return a Proposal and a state, found {_describe(result)}"
        )
    proposal, B, N = result[0], batch, drafter.num_nodes
    K, chain = drafter.num_speculative_tokens, proposal.parents is None
    # In a tree, nodes without children need no distribution, so the number of distributions varies.
    nodes = {N} if chain else set(range(N + 2))
    for name, kind, shapes in (
        ("tokens", jnp.integer, {(B, N)}),
        ("probs", jnp.floating, {(B, count, vocab) for count in nodes}),
        ("parents", jnp.integer, {(B, N)}),
        ("eligible", jnp.bool_, {(B, N)}),
    ):
        value = getattr(proposal, name)
        fits = name != "tokens" if value is None else getattr(value, "shape", None) in shapes
        if not fits or (value is not None and not jnp.issubdtype(value.dtype, kind)):
            advice = ". Load it for this target with load_drafter" if name == "probs" else ""
            raise InputError(
                f"drafter: expected {name} of a proposal as {kind.__name__} {list(max(shapes))}, "
                f"found {_describe(value)}{advice}"
            )
    if chain and N > K:
        raise InputError(f"drafter: expected a chain of at most K = {K} draft tokens, found {N}")
    return result


def _describe(value) -> str:
    """Returns type and shape of an array, or the type of another value, for a message."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {list(shape)}"


class TrainableDrafter(Drafter):
    """A drafter with weights of its own, `params["drafter"]`, that are trained on a target.

    Attributes:
        constants: names of parameters that are not trained.
    """

    constants: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def param_shapes(self, dtype) -> PyTree:
        """Returns the parameters' shapes as a nested dict of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def init_params(self, key: Array, dtype=jnp.float32) -> PyTree:
        """Returns random parameters to start training from."""


@pytree_dataclass
class FeatureState:
    """State of a `FeatureDrafter`."""

    cache: kv.KVCache  # slot t holds the pair of feature t and token t + 1
    last: Array  # [B, D] output at the last pair, which tells the next token; 0: there is no pair


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(TrainableDrafter):
    """Continues the target's features: a layer that reads each with the token that follows it.

    A pair's output stands for the next feature, and is drafted from. The cache holds pairs of the
    target's own features only: what was drafted is dropped when a round ends, and the accepted
    tokens are fed again with the features that the target has made of them.

    Attributes:
        config: shape of the layer.
        target: shape of the target.
        num_speculative_tokens: K. None: 4, or the depth of the tree.
        tree: shape of the tree; None: a chain.
    """

    config: Config
    target: Config
    num_speculative_tokens: int | None = None
    tree: growth.Shape = None

    def __post_init__(self):
        if self.num_speculative_tokens is not None:
            check_integer("num_speculative_tokens", self.num_speculative_tokens, 1)
        vocab = self.target.vocab_size
        K = growth.checked_depth(self.tree, self.num_speculative_tokens, vocab)
        object.__setattr__(self, "num_speculative_tokens", K)

    @property
    def split_like(self) -> Config:
        """Shape of the model by whose sharding rules the weights can be split."""
        return self.config

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

    def from_target(self, params: PyTree) -> PyTree:
        """Returns parameters that training begins with instead of random ones, from the target's.

        `params["drafter"]` holds the constants only.
        """
        return {}

    def step_weights(self, params: PyTree) -> PyTree:
        """Returns those of the arrays in `params` that every draft step multiplies with."""
        return params["drafter"]

    @abc.abstractmethod
    def features(self, params: PyTree, output: ModelOutput) -> Array:
        """Returns the features [B, T, D] of what the target has read."""

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

    @abc.abstractmethod
    def draft_logits(self, params: PyTree, outputs_BTD: Array) -> Array:
        """Returns the logits [B, T, R] of the draft's tokens as what follows each pair."""

    def draft_ids(self, params: PyTree) -> Array | None:
        """Returns the target's ids [R] of the draft's tokens; None: they are the target's."""
        return None

    def logits(self, params: PyTree, outputs_BTD: Array) -> Array:
        """Returns the logits [B, T, V] of the token that follows each pair."""
        logits = sharding.gather_vocab(self.draft_logits(params, outputs_BTD))
        ids = self.draft_ids(params)
        if ids is None:
            return logits
        # What is never drafted gets probability 0. (An infinity would be reported as one.)
        shape, least = (*logits.shape[:2], self.target.vocab_size), jnp.finfo(logits.dtype).min
        lowest = jnp.full(shape, least / 2, logits.dtype)
        return lowest.at[..., ids].set(logits)

    def init(self, params, batch, slots):
        config = self.config
        dtype = jax.tree.leaves(params["drafter"])[0].dtype
        shape = batch, config.num_kv_heads, slots, config.head_dim
        cache = kv.empty(1, shape, dtype, (None,))
        return FeatureState(cache, jnp.zeros((batch, config.d_model), dtype))

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
                return self.logits(params, state.last[:, None]), carry
            earlier = above & (fed <= block.size)  # the root and what is in the block
            parent = jnp.max(jnp.where(earlier, fed, 0), axis=2)
            parent = jnp.broadcast_to(parent, tokens_BT.shape)
            features = jnp.take_along_axis(outputs, parent[..., None], axis=1)
            positions = jnp.broadcast_to(lengths_B[:, None] - 2 + depth, tokens_BT.shape)
            new, grown = self.run(
                params, tokens_BT, features, cache, block, positions, above[:, :, 1:]
            )
            outputs = lax.dynamic_update_slice_in_dim(outputs, new, block.size + 1, axis=1)
            return self.logits(params, new), (outputs, grown)

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

    def _extended(self, params, state, tokens_BT, features_BTD, lengths_B) -> FeatureState:
        """Returns the state with some pairs behind the cache, of which it keeps `lengths_B`."""
        outputs, block = self.run(params, tokens_BT, features_BTD, state.cache)
        index = lengths_B - 1 - state.cache.lengths
        inside = (index >= 0) & (index < outputs.shape[1])
        index = jnp.clip(index, 0, outputs.shape[1] - 1)[:, None, None]
        found = jnp.take_along_axis(outputs, index, axis=1)[:, 0]
        last = jnp.where(inside[:, None], found, state.last)
        return FeatureState(state.cache.write(block, None, lengths_B, outputs), last)

    def run(
        self, params, tokens_BT, features_BTD, cache, block=None, positions_BT=None, ancestors=None
    ) -> tuple[Array, Block]:
        """Returns the outputs of pairs and the grown block; arguments as of `transformer.apply`."""
        context = context_of(tokens_BT.shape[1], cache, block, positions_BT, ancestors)
        segment = None if cache is None else cache.segments()[0]
        earlier = None if block is None else (block.keys[0], block.values[0])
        outputs, rows = self.outputs(params, tokens_BT, features_BTD, context, segment, earlier)
        return outputs, context.block([rows])
