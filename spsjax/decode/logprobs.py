"""Log-probabilities of emitted tokens, by the target's logits from which they were drawn."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import sampling, tree
from spsjax.sampling import RowParams
from spsjax.types import Array, Verdict, pytree_dataclass


@pytree_dataclass
class LogProbs:
    """The target's log-probabilities (natural logarithms) of tokens at the positions [...].

    An accepted draft token has the log-probability that autoregressive sampling gives it.
    """

    raw: Array  # [...] float32: of the target at temperature 1, without filters
    sampled: Array  # [...] float32: of the distribution sampled from, with temperature and filters
    top: Array  # [..., n] float32: the n largest at temperature 1, descending
    top_ids: Array  # [..., n] int32: the tokens of `top`

    def span(self, row: int, start: int, end: int) -> "LogProbs":
        """Returns those of the positions [start, end) of one row."""
        return jax.tree.map(lambda array: array[row, start:end], self)


def empty(batch: int, slots: int, top: int) -> LogProbs:
    """Returns log-probabilities [B, S] of which none is known."""
    zeros = jnp.zeros((batch, slots), jnp.float32)
    tops = jnp.zeros((batch, slots, top), jnp.float32)
    return LogProbs(zeros, zeros, tops, tops.astype(jnp.int32))


def of_verdict(logits_BMV: Array, verdict: Verdict, rows: RowParams, top: int) -> LogProbs:
    """Returns the log-probabilities [B, K+1] of a verdict's tokens; beyond them, any numbers.

    Token i was drawn after the path's node i, whether it was drafted or not.
    """
    logits = tree.along(verdict.path, logits_BMV)
    tokens = jnp.maximum(verdict.tokens, 0)[..., None]

    def at_tokens(values: Array) -> Array:
        return jnp.take_along_axis(values, tokens, axis=-1)[..., 0].astype(jnp.float32)

    raw = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    values, ids = lax.top_k(raw, top)
    sampled = jnp.log(at_tokens(sampling.to_probs(logits, rows)))
    return LogProbs(at_tokens(raw), sampled, values.astype(jnp.float32), ids)


def write(known: LogProbs, new: LogProbs, starts_B: Array) -> LogProbs:
    """Returns the log-probabilities with new ones [B, T] from a position of each row on."""
    put = jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=0))
    return jax.tree.map(lambda old, new: put(old, new, starts_B), known, new)
