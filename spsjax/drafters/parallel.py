"""Base classes of drafters that read only the last feature, without attention or a cache."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.drafters import features, sample, shapes
from spsjax.models.config import Config
from spsjax.types import Array, PyTree
from spsjax.utils.fields import integer


@dataclasses.dataclass(frozen=True)
class StateDrafter(features.FeatureDrafter):
    """Drafts from the last feature, the target's final hidden state.

    The state is the feature [B, D] of the second-to-last token per row, from which the target drew
    the last token; 0 if there is no such token.
    """

    target: Config
    num_speculative_tokens: int | None = None
    tree: shapes.Shape = None

    def init(self, params, batch, slots):
        return jnp.zeros((batch, self.target.d_model), self.dtype(params))

    def prefill(self, params, state, chunk, output):
        return features.at_index(state, output.hidden, chunk.lengths - 2 - chunk.starts)

    def commit(self, params, state, now, proposal, output, verdict):
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
    def max_steps(self):
        return self.num_heads

    @property
    def shares_head(self) -> bool:
        """Whether all heads have the same vocabulary matrix: the target's."""
        return True

    @abc.abstractmethod
    def outputs(self, params: PyTree, features_BTD: Array, depth: int) -> Array:
        """Returns the outputs [B, T, D] of the head at a depth, from features."""

    def propose(self, params, state, now):
        K = self.num_speculative_tokens
        heads = range(K)
        if self.shares_head:  # one product for all depths reads the matrix once
            outputs = [self.outputs(params, state[:, None], depth) for depth in heads]
            logits_BKV = self.logits(params, jnp.concatenate(outputs, axis=1))
        else:
            logits = [self._head_logits(params, state, depth, now.depths) for depth in heads]
            logits_BKV = jnp.concatenate(logits, axis=1)

        return sample.grow(self.tree, K, sample.feed_by_depth(logits_BKV), (), now)[0]

    def _head_logits(self, params, state_BD, depth: int, depths_B: Array | None) -> Array:
        """Returns the logits [B, 1, V] of a head, or zeros if no row drafts at this depth."""

        def run():
            return self.logits(params, self.outputs(params, state_BD[:, None], depth), depth)

        if depths_B is None or depth == 0:
            return run()
        shape = jax.eval_shape(run)
        is_needed = jnp.any(depths_B > depth)
        return lax.cond(is_needed, run, lambda: jnp.zeros(shape.shape, shape.dtype))

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
        run = jax.checkpoint(self.outputs, static_argnums=2) if remat else self.outputs
        if anchors is not None:
            features_BTD = features.entries(features_BTD, anchors)
        for depth in range(steps):
            if depth == 1 and later is not None:
                features_BTD = features_BTD[:, later]
            yield run(params, features_BTD, depth)
