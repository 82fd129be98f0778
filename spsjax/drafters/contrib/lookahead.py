"""Lookahead decoding: n-grams from Jacobi iteration (Fu et al. 2024, arXiv 2402.02057).

Every scoring pass also runs over a window of guessed tokens. The target's predictions there form
n-grams that may occur later, and a pool stores them. The n-grams of the pool that begin with the
last token are proposed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax import tree
from spsjax.drafters import base
from spsjax.errors import check_integer
from spsjax.types import (
    Array,
    Chunk,
    ModelOutput,
    Proposal,
    PyTree,
    Round,
    Verdict,
    pytree_dataclass,
)
from spsjax.utils.fields import flag, integer


@pytree_dataclass
class State:
    """Window and pool of each row of the batch.

    The guess in row r and column i of the window is for position i + r after the last token. The
    entry in row 0 and column 0 is unused: the last token takes its place.
    """

    window: Array  # [B, K, W] int32
    keys: Array  # [B, Q] int32, first token of each n-gram of the pool; -1: none
    values: Array  # [B, Q, K] int32, the tokens after it
    next: Array  # [B] int32, slot of the pool for the next n-gram, which has the oldest one
    prompts: Array  # [B] int32, lengths of the prompts


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Proposes n-grams that the target has predicted before. Lossless: tokens are point masses.

    An n-gram is a token and the K tokens after it. A round scores the root, the other K W - 1
    tokens of the window, and at most G K tokens of the pool. Tokens of the window are never
    accepted.

    Departures from the published code:
      * The window is initialised with n-grams of the prompt, so that the first round can propose.
      * The pool has Q slots for all n-grams, not G for each first token.
      * N-grams with a common prefix share its nodes, as in a trie.
      * K accepted tokens are followed by a bonus token.

    Attributes:
        num_speculative_tokens: K. The paper's N is K + 1.
        window: W, number of columns of the window.
        num_guesses: G, the most n-grams per proposal, the newest first.
        pool: Q, number of n-grams in the pool of a row.
        follow: whether the window moves by all tokens of a round, with tokens of the prompt in its
            new columns; else it moves by one token, the default of the published code.
    """

    num_speculative_tokens: int = integer(4)
    window: int = integer(15, 1)
    num_guesses: int = integer(15, 1)
    pool: int = 1024
    follow: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("pool", self.pool, max(self.num_guesses, self.window))

    @property
    def num_window_tokens(self) -> int:
        return max(self.num_speculative_tokens * self.window - 1, 0)

    @property
    def score_sizes(self) -> tuple[int, ...]:
        first, K, G = self.num_window_tokens, self.num_speculative_tokens, self.num_guesses
        return first, first + G // 4 * K, first + G * K

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        K, Q = self.num_speculative_tokens, self.pool
        zeros = jnp.zeros(batch, jnp.int32)
        return State(
            window=jnp.zeros((batch, K, self.window), jnp.int32),
            keys=jnp.full((batch, Q), -1, jnp.int32),
            values=jnp.zeros((batch, Q, K), jnp.int32),
            next=zeros,
            prompts=zeros,
        )

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        index = self._prompt_slots(chunk.lengths, 0) - chunk.starts[:, None, None]
        inside = (index >= 0) & (index < chunk.tokens.shape[1])
        window = jnp.where(inside, _take(chunk.tokens, index), state.window)
        return dataclasses.replace(state, window=window, prompts=chunk.lengths)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        B = len(now.tokens)
        tokens, parents = jax.vmap(self._guesses)(state, now.root)
        window_parents = jnp.broadcast_to(
            jnp.asarray(self._window_parents), (B, self.num_window_tokens)
        )
        window = state.window.reshape(B, -1)[:, 1:]  # without the root
        N = base.num_nodes(self)
        eligible = jnp.arange(N) >= self.num_window_tokens
        return Proposal(
            jnp.concatenate([window, tokens], axis=1),
            None,
            jnp.concatenate([window_parents, parents], axis=1),
            jnp.broadcast_to(eligible, (B, N)),
            aux=(now.root, jnp.ones(B, bool)),
        )

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        if proposal.aux == ():  # the window was not scored
            return state
        K, W = self.num_speculative_tokens, self.window
        root, scored = proposal.aux
        # Predictions at the last row of the window. Nodes include the root, so row r begins at r W.
        newest = output.logits[:, (K - 1) * W : K * W]
        newest = jnp.argmax(newest, axis=-1).astype(jnp.int32)
        grown = jnp.concatenate([state.window, newest[:, None]], axis=1)  # [B, K + 1, W]
        # A column is an n-gram that begins in row 0. The first column begins with the root.
        keys = grown[:, 0].at[:, 0].set(root)
        updated = jax.vmap(_add_to_pool)(state, keys, jnp.moveaxis(grown[:, 1:], 1, 2))
        window = grown[:, 1:]
        if self.follow:
            more = jnp.maximum(verdict.num_tokens - 1, 0)[:, None, None]
            column = jnp.arange(W) + more
            moved = jnp.take_along_axis(window, jnp.minimum(column, W - 1), axis=2)
            slots = self._prompt_slots(state.prompts, now.lengths[:, None, None])
            fresh = _take(now.tokens, slots)
            window = jnp.where(column < W, moved, fresh)
        updated = dataclasses.replace(updated, window=window)

        def unless_skipped(old: Array, new: Array) -> Array:
            return jnp.where(scored.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return jax.tree.map(unless_skipped, state, updated)

    @functools.cached_property
    def _window_parents(self) -> np.ndarray:
        """Parent of each token of the window: the token above, or in row 0 the previous token."""
        nodes = np.arange(self.num_speculative_tokens * self.window)
        return np.where(nodes < self.window, nodes - 1, nodes - self.window)[1:].astype(np.int32)

    def _prompt_slots(self, prompts_B: Array, salt: int | Array) -> Array:
        """Returns slots [B, K, W] of one pseudo-random n-gram of the prompt per column."""
        K, columns = self.num_speculative_tokens, jnp.arange(self.window)
        # Knuth's multiplicative hash. The choice needs no key, because it cannot bias a sample.
        hashed = (columns + salt + 1).astype(jnp.uint32) * jnp.uint32(2654435761)
        most = jnp.maximum(prompts_B - K, 0)[:, None, None] + 1
        first = (hashed >> 8).astype(jnp.int32) % most
        return jnp.minimum(first + jnp.arange(K)[:, None], prompts_B[:, None, None] - 1)

    def _guesses(self, state: State, root: Array) -> tuple[Array, Array]:
        """Returns tokens and parents [G K] of a row's n-grams that begin with the root.

        N-grams with a common prefix are merged: of equal nodes only the first has a token.
        """
        G, K, first = self.num_guesses, self.num_speculative_tokens, self.num_window_tokens
        age = (state.next - 1 - jnp.arange(self.pool)) % self.pool
        recency, slots = lax.top_k(jnp.where(state.keys == root, self.pool - age, 0), G)
        tokens, known = state.values[slots], recency > 0
        equal = jnp.cumprod(tokens[:, None] == tokens[None], axis=2, dtype=jnp.int32) > 0
        same = jnp.argmax(equal, axis=1)  # [G, K] first n-gram with the same prefix
        nodes = 1 + first + jnp.arange(G * K).reshape(G, K)
        above = jnp.take_along_axis(nodes, same, axis=0)[:, :-1]
        parents = jnp.pad(above, ((0, 0), (1, 0)))
        is_first = known[:, None] & (same == jnp.arange(G)[:, None])
        tokens = jnp.where(is_first, tokens, -1)
        return tokens.reshape(-1), jnp.where(known[:, None], parents, 0).reshape(-1)


def _add_to_pool(state: State, keys_W: Array, values_WK: Array) -> State:
    """Returns a row's state with more n-grams in its pool; a known n-gram becomes the newest."""
    equal = (keys_W == keys_W[:, None]) & jnp.all(values_WK == values_WK[:, None], axis=2)
    repeated = jnp.any(jnp.triu(equal, 1), axis=1)  # a later column has the same n-gram
    known = (state.keys == keys_W[:, None]) & jnp.all(state.values == values_WK[:, None], axis=2)
    keys_Q = jnp.where(jnp.any(known, axis=0), -1, state.keys)
    slots = (state.next + jnp.arange(len(keys_W))) % len(keys_Q)
    return dataclasses.replace(
        state,
        keys=keys_Q.at[slots].set(jnp.where(repeated, -1, keys_W)),
        values=state.values.at[slots].set(values_WK),
        next=(state.next + len(keys_W)) % len(keys_Q),
    )


def _take(tokens_BT: Array, index_BKW: Array) -> Array:
    """Returns the tokens [B, K, W] at indices, which are clipped."""
    B, K, W = index_BKW.shape
    index = jnp.clip(index_BKW.reshape(B, K * W), 0, tokens_BT.shape[1] - 1)
    return tree.along(index, tokens_BT).reshape(B, K, W)


from_name = base.by_name_alone(Drafter)
