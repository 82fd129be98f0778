"""Base classes of drafters that read only the last feature, without attention or a cache."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.drafters import features, sample, shapes
from spsjax.drafters.choices import Choices
from spsjax.models.config import Config
from spsjax.types import Array, Chunk, ModelOutput, Proposal, PyTree, Round, Verdict
from spsjax.utils.fields import derived, integer


@dataclasses.dataclass(frozen=True)
class StateDrafter(features.FeatureDrafter):
    """Drafts from the last feature, the target's final hidden state.

    The state is the feature [B, D] of the second-to-last token per row, from which the target drew
    the last token; 0 if there is no such token.
    """

    target: Config
    num_speculative_tokens: int = derived()
    tree: shapes.Shape = None

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        return jnp.zeros((batch, self.target.d_model), self.dtype(params))

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        return features.at_index(state, output.hidden, chunk.lengths - 2 - chunk.starts)

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        hidden = tree.along(verdict.path, output.hidden)
        return features.at_index(state, hidden, verdict.num_tokens - 1)


@dataclasses.dataclass(frozen=True)
class HeadsDrafter(StateDrafter):
    """Drafts with one head per depth, which does not depend on earlier draft tokens.

    Attributes:
        num_heads: number of heads, the greatest K.
    """

    steps_name: ClassVar[str] = "heads"
    separate_steps: ClassVar[bool] = True
    num_heads: int = integer(4, 1)

    @property
    def max_steps(self) -> int:
        return self.num_heads

    @property
    def shares_head(self) -> bool:
        """Whether all heads have the same vocabulary matrix: the target's."""
        return True

    @abc.abstractmethod
    def outputs(self, params: PyTree, features_BTD: Array, depth: int) -> Array:
        """Returns the outputs [B, T, D] of the head at a depth, from features."""

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        K = self.num_speculative_tokens
        heads = range(K)
        if self.shares_head:  # one product for all depths reads the matrix once
            outputs = [self.outputs(params, state[:, None], depth) for depth in heads]
            choices = self.choices(params, jnp.concatenate(outputs, axis=1))
        else:
            by_depth = [self._head_choices(params, state, depth, now.depths) for depth in heads]
            logits = jnp.concatenate([choices.logits for choices in by_depth], axis=1)
            choices = dataclasses.replace(by_depth[0], logits=logits)

        return sample.grow(self.tree, K, sample.feed_by_depth(choices), (), now)[0]

    def _head_choices(
        self, params: PyTree, state_BD: Array, depth: int, depths_B: Array | None
    ) -> Choices:
        """Returns the choices of a head, with logits 0 if no row drafts at this depth."""

        def run() -> Choices:
            return self.choices(params, self.outputs(params, state_BD[:, None], depth), depth)

        if depths_B is None or depth == 0:
            return run()
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run))
        return lax.cond(jnp.any(depths_B > depth), run, lambda: zeros)

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
        run = jax.checkpoint(self.outputs, static_argnums=2) if remat else self.outputs
        if anchors is not None:
            features_BTD = features.entries(features_BTD, anchors)
        for depth in range(steps):
            if depth == 1 and later is not None:
                features_BTD = features_BTD[:, later]
            yield run(params, features_BTD, depth)
