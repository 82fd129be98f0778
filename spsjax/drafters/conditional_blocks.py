"""Base class of block drafters whose tokens depend on the draft tokens before them."""

import abc
import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.drafters import base, blocks, features, sample, shapes
from spsjax.drafters.choices import Choices
from spsjax.drafters.sample import Level
from spsjax.parallel import sharding
from spsjax.types import Array, Proposal, PyTree, Round


@dataclasses.dataclass(frozen=True)
class ConditionalDrafter(blocks.BlockDrafter):
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

    def own(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Choices:
        """Returns the slots' own choices, which `corrected` corrects."""
        logits = sharding.gather_vocab(super().draft_logits(params, outputs_BTD, depth))
        return Choices(logits, self.draft_ids(params), self.target.vocab_size)

    @abc.abstractmethod
    def corrected(
        self, params: PyTree, own: Choices, outputs_BTD: Array, before_BTW: Array
    ) -> Choices:
        """Returns the choices of slots after the tokens before them.

        Args:
            params: parameters of target and drafter.
            own: result of `own` for the slots.
            outputs_BTD: outputs of the slots.
            before_BTW: embeddings of the tokens before (`before`), and behind each the memory of
                the slots before, W = R + M.
        """

    @abc.abstractmethod
    def correcting(self, weights: PyTree) -> PyTree:
        """Returns the arrays among the drafter's weights that `corrected` multiplies with."""

    def passes(self, params: PyTree) -> dict[str, base.Pass]:
        weights, K = self.correcting(params["drafter"]), self.num_speculative_tokens
        return super().passes(params) | {"corrections": base.Pass(weights, times=K)}

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
        own = self.own(params, outputs_BKD)
        (B, _, _), dtype = outputs_BKD.shape, outputs_BKD.dtype

        def feed(memories_BFM: PyTree, level: Level) -> tuple[Choices, Array | None, PyTree]:
            """Corrects the choices of the slot of a level (`sample.Feed`)."""
            choices = own.at(level.depth).broadcast(level.tokens.shape[1])
            outputs = lax.dynamic_slice_in_dim(outputs_BKD, level.depth, 1, axis=1)
            outputs = jnp.broadcast_to(outputs, (*level.tokens.shape, outputs.shape[2]))
            memory = jnp.zeros((B, 1, self.memory_size), dtype)
            if not level.is_root:
                memory = tree.along(level.parents, memories_BFM)
            before = self._read(params, level.tokens, memory)
            new = self.remember(params, outputs, before).astype(dtype)
            memories = lax.dynamic_update_slice_in_dim(memories_BFM, new, level.start, axis=1)
            return self.corrected(params, choices, outputs, before), outputs, memories

        fed = shapes.num_fed(self.tree, self.num_speculative_tokens)
        memories = jnp.zeros((B, fed, self.memory_size), dtype)
        return sample.grow(self.tree, self.num_speculative_tokens, feed, memories, now)[0]

    def _read(self, params: PyTree, tokens_BT: Array, memory_BTM: Array) -> Array:
        """Returns what `corrected` reads of tokens before slots, and of a memory: [B, T, W]."""
        before = self.before(params, jnp.maximum(tokens_BT, 0))
        return jnp.concatenate([before.astype(memory_BTM.dtype), memory_BTM], axis=-1)

    def unpacked(self, outputs_BTD: Array) -> tuple[Array, Array]:
        """Returns the parts of what `unrolled` yields.

        They are the outputs of the slots, and what `corrected` reads beside them [B, T, W].
        """
        outputs, before = jnp.split(outputs_BTD, (self.config.d_model,), axis=-1)
        return outputs, before

    def choices(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Choices:
        outputs, before = self.unpacked(outputs_BTD)
        return self.corrected(params, self.own(params, outputs, depth), outputs, before)

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        return self.choices(params, outputs_BTD, depth).logits

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
