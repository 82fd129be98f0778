"""Lookahead decoding: the target guesses far ahead of itself (Fu et al. 2024, arXiv 2402.02057).

Every pass also runs over a window of guessed tokens. What the target makes of them are n-grams that
may come up later, and they are kept in a pool. Those that begin with the last token are proposed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax import tree
from spsjax.drafters import base
from spsjax.errors import check_flag, check_integer
from spsjax.types import Array, Proposal, pytree_dataclass


@pytree_dataclass
class State:
    """Window and pool of each row.

    The guess in row r and column i of the window is for position i + r after the last token. That
    of row 0 and column 0 is the last token itself, whatever stands there.
    """

    window: Array  # [B, K, W] int32
    keys: Array  # [B, Q] int32, first token of each n-gram of the pool; -1: none
    values: Array  # [B, Q, K] int32, the tokens after it
    next: Array  # [B] int32, place of the next n-gram, on top of the oldest
    prompts: Array  # [B] int32, lengths of the prompts


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Proposes n-grams that the target has guessed before. Lossless: its tokens are point masses.

    An n-gram is a token and the K tokens after it. A round scores the root, the window's
    K W - 1 other tokens, and at most G K tokens of the pool; the window's are never accepted.

    Departures from the published code: the whole window begins with n-grams of the prompt, so that
    there are no rounds before the first proposal; a pool has a number of places for all n-grams,
    not G for each first token; n-grams that begin alike share their tokens, as in a trie; after
    K accepted tokens comes one more.

    Attributes:
        num_speculative_tokens: K. The paper's N is K + 1.
        window: W, columns of the window.
        num_guesses: G, the most n-grams that a round proposes, newest first.
        pool: Q, n-grams that a row remembers.
        follow: whether the window moves by all tokens of a round, with tokens of the prompt in its
            new columns; else it moves by one, as by default in the published code.
    """

    num_speculative_tokens: int = 4
    window: int = 15
    num_guesses: int = 15
    pool: int = 1024
    follow: bool = False

    def __post_init__(self):
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 0)
        check_integer("window", self.window, 1)
        check_integer("num_guesses", self.num_guesses, 1)
        check_integer("pool", self.pool, max(self.num_guesses, self.window))
        check_flag("follow", self.follow)

    @property
    def num_window_tokens(self) -> int:
        return max(self.num_speculative_tokens * self.window - 1, 0)

    @property
    def score_sizes(self) -> tuple[int, ...]:
        first, K, G = self.num_window_tokens, self.num_speculative_tokens, self.num_guesses
        return first, first + G // 4 * K, first + G * K

    def init(self, params, batch, slots):
        K, Q = self.num_speculative_tokens, self.pool
        zeros = jnp.zeros(batch, jnp.int32)
        return State(
            window=jnp.zeros((batch, K, self.window), jnp.int32),
            keys=jnp.full((batch, Q), -1, jnp.int32),
            values=jnp.zeros((batch, Q, K), jnp.int32),
            next=zeros,
            prompts=zeros,
        )

    def prefill(self, params, state, chunk, output):
        index = self._places(chunk.lengths, 0) - chunk.starts[:, None, None]
        inside = (index >= 0) & (index < chunk.tokens.shape[1])
        window = jnp.where(inside, _taken(chunk.tokens, index), state.window)
        return dataclasses.replace(state, window=window, prompts=chunk.lengths)

    def propose(self, params, state, now):
        B = len(now.tokens)
        tokens, parents = jax.vmap(self._guesses)(state, now.root)
        own = jnp.broadcast_to(jnp.asarray(self._window_parents), (B, self.num_window_tokens))
        window = state.window.reshape(B, -1)[:, 1:]  # but for the root
        N = base.num_nodes(self)
        eligible = jnp.arange(N) >= self.num_window_tokens
        return Proposal(
            jnp.concatenate([window, tokens], axis=1),
            None,
            jnp.concatenate([own, parents], axis=1),
            jnp.broadcast_to(eligible, (B, N)),
            aux=(now.root, jnp.ones(B, bool)),
        )

    def commit(self, params, state, now, proposal, output, verdict):
        if proposal.aux == ():  # the window was not scored
            return state
        K, W = self.num_speculative_tokens, self.window
        root, scored = proposal.aux
        newest = output.logits[:, (K - 1) * W : K * W]  # nodes of the last row, the root included
        newest = jnp.argmax(newest, axis=-1).astype(jnp.int32)
        grown = jnp.concatenate([state.window, newest[:, None]], axis=1)  # [B, K + 1, W]
        # A column's n-gram begins in row 0, where the root takes the first column.
        keys = grown[:, 0].at[:, 0].set(root)
        kept = jax.vmap(_remember)(state, keys, jnp.moveaxis(grown[:, 1:], 1, 2))
        window = grown[:, 1:]
        if self.follow:
            more = jnp.maximum(verdict.num_tokens - 1, 0)[:, None, None]
            column = jnp.arange(W) + more
            moved = jnp.take_along_axis(window, jnp.minimum(column, W - 1), axis=2)
            places = self._places(state.prompts, now.lengths[:, None, None])
            fresh = _taken(now.tokens, places)
            window = jnp.where(column < W, moved, fresh)
        moved = dataclasses.replace(kept, window=window)

        def chosen(old, new):
            return jnp.where(scored.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return jax.tree.map(chosen, state, moved)

    @functools.cached_property
    def _window_parents(self) -> np.ndarray:
        """The parent of each token of the window: the one above it, or before it in row 0."""
        nodes = np.arange(self.num_speculative_tokens * self.window)
        return np.where(nodes < self.window, nodes - 1, nodes - self.window)[1:].astype(np.int32)

    def _places(self, prompts_B: Array, salt) -> Array:
        """Returns [B, K, W] places in the prompts: an n-gram per column, at a place like random."""
        K, columns = self.num_speculative_tokens, jnp.arange(self.window)
        hashed = (columns + salt + 1).astype(jnp.uint32) * jnp.uint32(2654435761)
        most = jnp.maximum(prompts_B - K, 0)[:, None, None] + 1
        place = (hashed >> 8).astype(jnp.int32) % most
        return jnp.minimum(place + jnp.arange(K)[:, None], prompts_B[:, None, None] - 1)

    def _guesses(self, state: State, root: Array) -> tuple[Array, Array]:
        """Returns tokens and parents [G K] of a row's n-grams that begin with the root.

        N-grams that begin alike are merged: of equal nodes only the first has a token.
        """
        G, K, first = self.num_guesses, self.num_speculative_tokens, self.num_window_tokens
        age = (state.next - 1 - jnp.arange(self.pool)) % self.pool
        found, place = lax.top_k(jnp.where(state.keys == root, self.pool - age, 0), G)
        tokens, known = state.values[place], found > 0
        equal = jnp.cumprod(tokens[:, None] == tokens[None], axis=2, dtype=jnp.int32) > 0
        same = jnp.argmax(equal, axis=1)  # [G, K] the first that is equal; unknown ones come last
        nodes = 1 + first + jnp.arange(G * K).reshape(G, K)
        above = jnp.take_along_axis(nodes, same, axis=0)[:, :-1]
        parents = jnp.pad(above, ((0, 0), (1, 0)))
        is_first = known[:, None] & (same == jnp.arange(G)[:, None])
        tokens = jnp.where(is_first, tokens, -1)
        return tokens.reshape(-1), jnp.where(known[:, None], parents, 0).reshape(-1)


def _remember(state: State, keys: Array, values: Array) -> State:
    """Returns a row's state with n-grams [W], [W, K]; one that it had is the newest again."""
    equal = (keys == keys[:, None]) & jnp.all(values == values[:, None], axis=2)
    later = jnp.any(jnp.triu(equal, 1), axis=1)  # the same n-gram in a later column
    again = (state.keys == keys[:, None]) & jnp.all(state.values == values[:, None], axis=2)
    held = jnp.where(jnp.any(again, axis=0), -1, state.keys)
    place = (state.next + jnp.arange(len(keys))) % len(held)
    return dataclasses.replace(
        state,
        keys=held.at[place].set(jnp.where(later, -1, keys)),
        values=state.values.at[place].set(values),
        next=(state.next + len(keys)) % len(held),
    )


def _taken(tokens_BT: Array, index_BKW: Array) -> Array:
    """Returns the tokens [B, K, W] at some indices, which are clipped."""
    B, K, W = index_BKW.shape
    index = jnp.clip(index_BKW.reshape(B, K * W), 0, tokens_BT.shape[1] - 1)
    return tree.along(index, tokens_BT).reshape(B, K, W)


def from_name(text: str, target):
    """Returns the drafter and its weights; nothing may stand behind its name."""
    base.check_alone("lookahead", text)
    return Drafter(), {}
