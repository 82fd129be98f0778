"""Logits of the tokens that a drafter can draw, which may be a part of the vocabulary."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from spsjax.types import AnyArray, Array, pytree_dataclass


@pytree_dataclass
class Choices:
    """Logits of R of the target's V tokens after each node; other tokens have probability 0.

    A draft vocabulary, or the candidates of a slot: temperature, filters and the draw read R
    numbers in place of V.
    """

    logits: Array  # [B, T, R]
    ids: Array | None = None  # [R] or [B, T, R] int32, the tokens in ascending order; None: all V
    vocab_size: int = dataclasses.field(default=0, metadata={"static": True})  # V, if there are ids

    @classmethod
    def of(cls, logits: "Array | Choices") -> "Choices":
        """Returns choices, or logits [B, T, V] of all tokens as choices."""
        return logits if isinstance(logits, Choices) else cls(logits)

    def all_ids(self) -> Array:
        """Returns the tokens of all choices [B, T, R]."""
        ids = jnp.arange(self.logits.shape[-1]) if self.ids is None else self.ids
        return jnp.broadcast_to(ids, self.logits.shape)

    def tokens(self, index_BTN: Array) -> Array:
        """Returns the tokens [B, T, N] at indices in [0, R); -1 stays -1."""
        if self.ids is None:
            return index_BTN
        tokens = jnp.take_along_axis(self.all_ids(), jnp.maximum(index_BTN, 0), axis=-1)
        return jnp.where(index_BTN < 0, -1, tokens)

    def spread(self, values_BTR: Array, others: ArrayLike = 0) -> Array:
        """Returns values [B, T, V] of all tokens from those of the choices."""
        if self.ids is None:
            return values_BTR
        shape = *values_BTR.shape[:2], self.vocab_size
        base = jnp.broadcast_to(jnp.asarray(others, values_BTR.dtype), shape)
        if self.ids.ndim == 1:
            return base.at[..., self.ids].set(values_BTR)
        return jnp.put_along_axis(base, self.ids, values_BTR, axis=-1, inplace=False)

    def spread_probs(self, probs_BTR: Array) -> Array:
        """Returns the probabilities [B, T, V] of all tokens; all are NaN if one is."""
        return self.spread(probs_BTR, jnp.where(jnp.isnan(probs_BTR[..., :1]), jnp.nan, 0))

    def whole(self) -> Array:
        """Returns the logits [B, T, V] of all tokens.

        Those of other tokens are very low and finite, because `sampling.to_probs` reports a row
        with an infinite logit as an error.
        """
        return self.spread(self.logits, jnp.finfo(self.logits.dtype).min / 2)

    def at(self, node: int | Array) -> "Choices":
        """Returns the choices [B, 1, R] after one node, or at one depth."""
        return self._each(lambda array: lax.dynamic_slice_in_dim(array, node, 1, axis=1))

    def after(self, nodes: AnyArray) -> "Choices":
        """Returns the choices after some nodes, whose indices are constants."""
        return self._each(lambda array: array[:, nodes])

    def broadcast(self, nodes: int) -> "Choices":
        """Returns the choices [B, 1, R] for every one of so many nodes."""
        return self._each(
            lambda array: jnp.broadcast_to(array, (len(array), nodes, array.shape[2]))
        )

    def best(self, count: int) -> tuple[Array, Array]:
        """Returns the N most probable tokens, behind their log probabilities: [B, T, N] each."""
        if count > self.logits.shape[-1]:
            return Choices(self.whole()).best(count)
        scores, index = lax.top_k(jax.nn.log_softmax(self.logits), count)
        return scores, self.tokens(index)

    def _each(self, function: Callable[[Array], Array]) -> "Choices":
        """Returns the choices with a function applied to all arrays of nodes."""
        ids = self.ids if self.ids is None or self.ids.ndim == 1 else function(self.ids)
        return dataclasses.replace(self, logits=function(self.logits), ids=ids)
