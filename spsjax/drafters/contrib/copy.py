"""Aggressive decoding: copies of the prompt, for tasks that edit a text.

It is the input-guided form of Sun et al. 2021 (arXiv 2106.04970) and Ge et al. 2022 (arXiv
2205.10350).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.drafters import base
from spsjax.drafters.base import Target
from spsjax.types import Array, Chunk, ModelOutput, Proposal, PyTree, Round, pytree_dataclass
from spsjax.utils.fields import flag, integer


@pytree_dataclass
class State:
    """Position in the prompt from which a row copies.

    Attributes:
        prompts: [B] int32, lengths of the prompts.
        lengths: [B] int32, committed tokens that have been compared with the prompt.
        next: [B] int32, index in the prompt of the token that should come next; -1: unknown.
    """

    prompts: Array
    lengths: Array
    next: Array


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Copies the prompt from the position that the output has reached. Lossless: point masses.

    As long as the output repeats the prompt, the drafter proposes the next tokens of the prompt.
    After a different token, it looks up the shortest suffix of the output that occurs exactly once
    in the prompt, and continues there. If there is none, it takes the token as a replacement of the
    expected one. The published rule proposes nothing in this case. (`ngram` uses the latest
    occurrence instead.)

    Attributes:
        num_speculative_tokens: K, number of copied tokens per round.
        start: index in the prompt of the first expected token. `load_drafter` sets it to the number
            of tokens that the tokenizer puts before every text.
        max_suffix: longest suffix of the output that is looked up, at most 8.
        replaces: whether a token without a match replaces the expected one; False: published rule.
    """

    num_speculative_tokens: int = integer(2 * base.SCHEDULED_TOKENS + 1)  # 16 rows with the root
    start: int = integer(0, most=2**31 - 1)
    max_suffix: int = integer(3, 1, 8)  # every round compares all of them
    replaces: bool = flag(True)

    @property
    def score_sizes(self) -> tuple[int, ...]:
        K = self.num_speculative_tokens
        return 0, K // 4, K

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        zeros = jnp.zeros(batch, jnp.int32)
        return State(zeros, zeros, zeros - 1)

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        begin = jnp.where(self.start < chunk.lengths, self.start, -1).astype(jnp.int32)
        return State(chunk.lengths, chunk.lengths, begin)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        index = state.next[:, None] + jnp.arange(self.num_speculative_tokens)
        known = (state.next[:, None] >= 0) & (index < state.prompts[:, None])
        copied = jnp.take_along_axis(now.tokens, jnp.where(known, index, 0), axis=1)
        return Proposal(jnp.where(known, copied, -1), None)

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        rule = functools.partial(_follow, most=self.max_suffix, replaces=self.replaces)
        follow = jax.vmap(rule)

        def compare(step: Array, expected: Array) -> Array:
            end = state.lengths + step
            inside = jnp.minimum(end, now.tokens.shape[1] - 1)
            later = follow(now.tokens, state.prompts, inside, expected)
            return jnp.where(end < now.lengths, later, expected)

        steps = jnp.max(now.lengths - state.lengths)
        return State(state.prompts, now.lengths, lax.fori_loop(0, steps, compare, state.next))


def _follow(
    tokens_S: Array, prompt: Array, end: Array, expected: Array, most: int, replaces: bool
) -> Array:
    """Returns the next index in the prompt after one more token of the output; -1: unknown.

    Args:
        tokens_S: prompt and output.
        prompt: length of the prompt.
        end: index of the output's token.
        expected: index in the prompt of the expected token; -1: none.
        most: longest suffix of the output that is looked up.
        replaces: whether a token without a match replaces the expected one.
    """
    slots = jnp.arange(len(tokens_S))
    as_expected = (expected >= 0) & (tokens_S[expected] == tokens_S[end])
    # matches[e]: whether the prompt's last `size` + 1 tokens up to e equal the output's last ones.
    matches, aligned = slots < prompt, jnp.full((), -1, jnp.int32)
    for size in range(most):
        matches &= (slots >= size) & (jnp.roll(tokens_S, size) == tokens_S[end - size])
        matches &= end - size >= prompt
        unique = jnp.sum(matches) == 1  # a longer suffix has the same match or none
        aligned = jnp.where(unique, jnp.argmax(matches) + 1, aligned)
    replaced = jnp.where(expected >= 0, expected + 1, -1) if replaces else -1
    aligned = jnp.where(aligned >= 0, aligned, replaced)
    later = jnp.where(as_expected, expected + 1, aligned)
    return jnp.where(later < prompt, later, -1).astype(jnp.int32)


def from_name(text: str, target: Target) -> tuple[Drafter, PyTree]:
    """Returns the drafter and its weights; it skips the tokens that precede every text."""
    base.check_alone("copy", text)
    return Drafter(start=0 if target.tokenizer is None else len(target.tokenizer.encode(""))), {}
