"""Suffix decoding: the most frequent continuations of earlier occurrences of the last tokens.

Oliaro et al. 2024 (arXiv 2411.04975). No suffix trie is built: a node of the trie is the set of
positions in the row's text where its tokens occur, and the set is a mask over the text.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.drafters import base, datastore
from spsjax.drafters.base import Target
from spsjax.errors import InputError
from spsjax.types import Array, Proposal, PyTree, Round, pytree_dataclass
from spsjax.utils import traced
from spsjax.utils.fields import integer, number

_STORED = 32  # matches in a store that are examined, evenly spaced among all matches


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Proposes the likeliest continuations of the last tokens, by counts in the row's own text.

    Lossless: a proposed token is a point mass. The text is the prompt and the generated tokens. The
    last p tokens are looked up for every p at which they occurred before. The probability of a
    continuation is its relative frequency. The score of a proposal is the sum of its tokens' path
    probabilities, which is the expected number of accepted tokens. The p with the highest score
    wins. A longer match may propose more tokens.

    With a `datastore.Store` (`params["drafter"]`) of finished outputs or a corpus, the proposal
    comes from the store if that one has a higher score. REST uses a corpus in this way (He et al.
    2023, arXiv 2311.08252), but with a lossy acceptance rule. Of many matches in a store, only some
    are examined.

    Departure from the paper: the last tokens themselves do not count as an occurrence, because
    nothing follows them.

    Attributes:
        num_speculative_tokens: K, the greatest depth of a proposal.
        num_tree_tokens: N, the most tokens of a tree; 0: a chain of the likeliest tokens.
        max_match: longest suffix that is looked up.
        factor: depth of the proposal per matched token.
        min_prob: lowest path probability of a proposed token.
    """

    num_speculative_tokens: int = integer(base.SCHEDULED_TOKENS)
    num_tree_tokens: int = integer(0)
    max_match: int = integer(64, 1, 2**16)
    factor: float = traced.number(1.0, of=number, most=1e6)
    min_prob: float = traced.share(0.1)

    @property
    def score_sizes(self) -> tuple[int, ...]:
        N = self.num_tree_tokens or self.num_speculative_tokens
        return *(size for size in (0, 2, N // 2) if size < N), N  # matches are often short

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        if not base.num_nodes(self):
            return Proposal(jnp.zeros((len(now.tokens), 0), jnp.int32), None)
        best = jax.vmap(self._best, in_axes=(0, 0, None))
        score, (tokens, parents) = best(now.tokens, now.lengths, params["drafter"] or None)
        parents = parents if self.num_tree_tokens else None
        return Proposal(tokens, None, parents, aux=score)

    def _best(
        self, tokens_S: Array, length: Array, store: datastore.Sorted | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns the best proposal over all match lengths: score, tokens [N], parents [N]."""
        text = _text(tokens_S, length)
        matched_S = _matched(text, self.max_match)

        def grow(match: Array) -> tuple[_Nodes, Array]:
            # Shorter matches at the same positions cannot win, so the next length is that of the
            # longest match at other positions.
            shorter = jnp.max(jnp.where(matched_S < match, matched_S, 0))
            return self._grow(text, matched_S >= match, self._limit(match)), shorter

        best = self._longest_score(jnp.max(matched_S), grow)
        if store is None:
            return best
        back = jnp.arange(min(self.max_match, store.max_match))
        recent_P = jnp.where(back < length, tokens_S[jnp.maximum(length - 1 - back, 0)], -1)

        def grow_stored(match: Array) -> tuple[_Nodes, Array]:
            begin, end, shorter = datastore.matches(store, recent_P, match)
            stored, starts = self._stored_text(store, begin, end)
            return self._grow(stored, starts, self._limit(match)), shorter

        other = self._longest_score(datastore.longest_match(store, recent_P), grow_stored)
        is_better = other[0] > best[0]
        return jax.tree.map(lambda new, old: jnp.where(is_better, new, old), other, best)

    def _limit(self, match: Array) -> Array:
        """Returns the greatest depth of a proposal after a match."""
        steps = jnp.floor(match * self.factor + 1e-6).astype(jnp.int32)
        return jnp.minimum(steps, self.num_speculative_tokens)

    def _stored_text(
        self, store: datastore.Sorted, begin: Array, end: Array
    ) -> tuple["_Text", Array]:
        """Returns the continuations of matches in a store as one text, and the matches' ends."""
        width = self.num_speculative_tokens + 1
        entries = begin + jnp.arange(_STORED) * jnp.maximum(end - begin, 1) // _STORED
        spread = begin + jnp.arange(_STORED)
        entries = jnp.where(end - begin > _STORED, entries, spread)
        positions = store.order[jnp.minimum(entries, len(store.order) - 1)]
        index = positions[:, None] + jnp.arange(width)
        tokens = jnp.where(
            index < len(store.tokens), store.tokens[jnp.minimum(index, len(store.tokens) - 1)], -1
        )
        # Masks tokens after the end of a stored text.
        tokens = jnp.where(jnp.cumsum(tokens < 0, axis=1) > 0, -1, tokens).reshape(-1)
        starts = jnp.zeros((_STORED, width), bool).at[:, 0].set(entries < end).reshape(-1)
        return _Text(tokens, _token_ids(tokens)), starts

    def _longest_score(
        self, longest: Array, grow: Callable[[Array], tuple["_Nodes", Array]]
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns the best proposal over all match lengths, in the form of `_best`.

        Args:
            longest: length of the longest match.
            grow: function of a length that returns the nodes after its matches, and the next
                shorter length.
        """
        N = base.num_nodes(self)
        nothing = jnp.full(N, -1), jnp.zeros(N, jnp.int32)

        def may_win(carry: PyTree) -> Array:
            match, best, _ = carry
            # The probabilities of one depth add up to at most 1, so a score is at most the depth.
            # Most short matches are skipped by this bound.
            return (match > 0) & (best < self._limit(match))

        def look(carry: PyTree) -> PyTree:
            match, best, proposal = carry
            nodes, shorter = grow(match)
            score = jnp.sum(nodes.probs[1:])
            grown = nodes.tokens[1:], nodes.parents[1:]
            better = score > best  # at equal scores the longer match wins
            proposal = jax.tree.map(lambda new, old: jnp.where(better, new, old), grown, proposal)
            return shorter, jnp.maximum(score, best), proposal

        return lax.while_loop(may_win, look, (longest, jnp.zeros(()), nothing))[1:]

    def _grow(self, text: "_Text", starts_S: Array, limit: Array) -> "_Nodes":
        """Returns the proposal after the matches that end at `starts_S`, at most `limit` deep."""

        def add(node: Array, nodes: "_Nodes") -> "_Nodes":
            # A chain continues after its last node, a tree after the node of the likeliest child.
            open_nodes = nodes.depths < limit
            if not self.num_tree_tokens:
                open_nodes &= jnp.arange(len(open_nodes)) == node - 1
            probs = jnp.where(open_nodes, nodes.next_probs, 0)
            parent = jnp.argmax(probs)
            likely = (probs[parent] > 0) & (probs[parent] >= self.min_prob)
            grown = _with_child(text, nodes, node, parent)
            return jax.tree.map(lambda new, old: jnp.where(likely, new, old), grown, nodes)

        N = base.num_nodes(self)
        root = _empty(N, text)
        matches = starts_S & _following(text, 0)[1]
        root = dataclasses.replace(
            root,
            probs=root.probs.at[0].set(1),
            matches=root.matches.at[0].set(matches),
            totals=root.totals.at[0].set(jnp.sum(matches, dtype=jnp.int32)),
        )
        return lax.fori_loop(1, N + 1, add, _with_next(text, root, 0))


@pytree_dataclass
class _Text:
    """Text with small ids of its tokens, by which they can be counted."""

    tokens: Array  # [S] int32; -1: no token
    ids: Array  # [S] in [0, S), equal where tokens are equal


def _text(tokens_S: Array, length: Array) -> _Text:
    """Returns the committed text of a row."""
    tokens = jnp.where(jnp.arange(len(tokens_S)) < length, tokens_S, -1)
    return _Text(tokens, _token_ids(tokens))


@pytree_dataclass
class _Nodes:
    """Nodes of a proposal, the root first, with the matches behind them."""

    tokens: Array  # [N+1] int32; -1: no node
    parents: Array  # [N+1] int32
    depths: Array  # [N+1] int32
    probs: Array  # [N+1] float32, probability of the path; 0: no node
    totals: Array  # [N+1] int32, number of occurrences that are followed by a token
    matches: Array  # [N+1, S] bool, occurrences whose next token is not yet a child of the node
    next_probs: Array  # [N+1] float32, path probability of the node's next child
    next_match: Array  # [N+1] int32, an occurrence that is followed by the next child


def _empty(count: int, text: _Text) -> _Nodes:
    zeros = jnp.zeros(count + 1, jnp.int32)
    none = jnp.zeros(count + 1)
    matches = jnp.zeros((count + 1, len(text.tokens)), bool)
    return _Nodes(zeros - 1, zeros, zeros, none, zeros, matches, none, zeros)


def _following(text: _Text, depth: int | Array) -> tuple[Array, Array]:
    """Returns the index [S] of the token `depth` + 1 after each slot, and whether it exists [S]."""
    slots = jnp.arange(len(text.tokens))
    index = slots + 1 + depth
    inside = jnp.minimum(index, len(slots) - 1)
    return inside, (index < len(slots)) & (text.tokens[inside] >= 0)


def _with_next(text: _Text, nodes: _Nodes, node: int | Array) -> _Nodes:
    """Returns the nodes with the next child of one of them: its most frequent next token."""
    index, _ = _following(text, nodes.depths[node])
    ids, matches = text.ids[index], nodes.matches[node]
    counts = jnp.zeros(len(matches), jnp.int32).at[ids].add(matches.astype(jnp.int32))
    counts = jnp.where(matches, counts[ids], 0)
    # The last maximum: among equally frequent tokens, the one that occurred last.
    match = len(matches) - 1 - jnp.argmax(counts[::-1])
    prob = nodes.probs[node] * counts[match] / jnp.maximum(nodes.totals[node], 1)
    return dataclasses.replace(
        nodes,
        next_probs=nodes.next_probs.at[node].set(prob),
        next_match=nodes.next_match.at[node].set(match.astype(jnp.int32)),
    )


def _with_child(text: _Text, nodes: _Nodes, node: Array, parent: Array) -> _Nodes:
    """Returns the nodes with the next child of `parent` as node number `node`."""
    index, _ = _following(text, nodes.depths[parent])
    match = nodes.next_match[parent]
    ids = text.ids[index]
    same = nodes.matches[parent] & (ids == ids[match])  # occurrences with the child's token
    depth = nodes.depths[parent] + 1
    followed = same & _following(text, depth)[1]
    nodes = _Nodes(
        nodes.tokens.at[node].set(text.tokens[index[match]]),
        nodes.parents.at[node].set(parent.astype(jnp.int32)),
        nodes.depths.at[node].set(depth),
        nodes.probs.at[node].set(nodes.next_probs[parent]),
        nodes.totals.at[node].set(jnp.sum(followed, dtype=jnp.int32)),
        nodes.matches.at[parent].set(nodes.matches[parent] & ~same).at[node].set(followed),
        nodes.next_probs,
        nodes.next_match,
    )
    return _with_next(text, _with_next(text, nodes, parent), node)


def _matched(text: _Text, most: int) -> Array:
    """Returns the length [S] of the common suffix of the text and its prefix up to each slot.

    It is 0 at the last token and after it.

    Args:
        text: text of the row.
        most: greatest length that is counted.
    """
    slots = jnp.arange(len(text.tokens))
    last = jnp.sum(text.tokens >= 0) - 1

    def longer(carry: PyTree) -> PyTree:
        back, run, matched = carry
        suffix = text.tokens[jnp.maximum(last - back, 0)]
        run &= (slots >= back) & (jnp.roll(text.tokens, back) == suffix)
        return back + 1, run, matched + run

    start = jnp.zeros((), jnp.int32), slots < last, jnp.zeros_like(slots)
    return lax.while_loop(lambda carry: (carry[0] < most) & jnp.any(carry[1]), longer, start)[2]


def _token_ids(tokens_S: Array) -> Array:
    """Returns ids [S] in [0, S) that are equal where tokens are equal, for counts in S bins."""
    order = jnp.argsort(tokens_S)
    ordered = tokens_S[order]
    is_new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros_like(tokens_S).at[order].set(jnp.cumsum(is_new, dtype=tokens_S.dtype))


def from_name(text: str, target: Target) -> tuple[Drafter, PyTree]:
    """Returns the drafter and its weights: "suffix", or "suffix:FILE" with a store of texts."""
    if not text:
        return Drafter(), {}
    if target.tokenizer is None:
        raise InputError(f"suffix:{text}: expected a target with a tokenizer, found none")
    return with_store(Drafter(), datastore.read(text, target.tokenizer), target.config.vocab_size)


def with_store(drafter: Drafter, store: datastore.Store, vocab_size: int) -> tuple[Drafter, PyTree]:
    """Returns the drafter and, as its weights, the texts of a store.

    Raises InputError for token ids that the target does not have.
    """
    texts = store.sorted()
    if (most := int(texts.tokens.max())) >= vocab_size:
        raise InputError(f"store: expected token ids in [0, {vocab_size}), found {most}")
    return drafter, texts
