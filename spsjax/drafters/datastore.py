"""Texts to look up beside a row's own: finished outputs, or a corpus (REST, arXiv 2311.08252)."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax.errors import InputError, check_integer, short_repr
from spsjax.types import Array, pytree_dataclass
from spsjax.utils import jsonl


@pytree_dataclass
class Sorted:
    """Tokens of some texts, and the places in them in the order of what stands before.

    Attributes:
        tokens: [C] int32; -1 between texts and behind them.
        order: [C] int32, all places, sorted by their token, then by the one before it, and so on
            for `max_match` tokens.
        max_match: longest match that can be looked up.
    """

    tokens: Array
    order: Array
    max_match: int = dataclasses.field(metadata={"static": True})


class Store:
    """Texts of one caller. When it is full, the oldest are forgotten.

    Two stores share nothing. Give every tenant one of his own: what is proposed shows through the
    speed of a call which texts a store holds.

    Args:
        capacity: tokens that it holds; every text takes one more. Of a longer text the end is kept.
        max_match: longest match that can be looked up.
    """

    def __init__(self, capacity: int = 2**17, max_match: int = 16):
        check_integer("capacity", capacity, 2, 2**30)
        check_integer("max_match", max_match, 1)
        self.capacity, self.max_match = capacity, max_match
        self._texts: collections.deque[np.ndarray] = collections.deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds a text; of one that is too long the end. Raises InputError unless they are ids."""
        try:
            ids = np.asarray(tokens)
        except ValueError:
            ids = np.asarray(None)
        whole = ids.ndim == 1 and (not ids.size or np.issubdtype(ids.dtype, np.integer))
        if not whole or (ids.size and not 0 <= ids.min() <= ids.max() < 2**31):
            raise InputError(f"tokens: expected token ids, found {short_repr(tokens)}")
        if not ids.size:
            return
        text = ids[-(self.capacity - 1) :].astype(np.int32)
        self._texts.append(text)
        self._size += len(text) + 1
        while self._size > self.capacity:
            self._size -= len(self._texts.popleft()) + 1

    def extend(self, texts: Iterable[Sequence[int]]) -> None:
        """Adds texts, as `add` does."""
        if not isinstance(texts, Iterable):
            raise InputError(f"texts: expected several texts, found {short_repr(texts)}")
        for tokens in texts:
            self.add(tokens)

    def sorted(self) -> Sorted:
        """Returns the texts as arrays of the host, whose shapes depend on the capacity alone."""
        tokens = np.full(self.capacity, -1, np.int32)
        end = 0
        for text in self._texts:
            tokens[end : end + len(text)] = text
            end += len(text) + 1
        return Sorted(tokens, _sorted_places(tokens, self.max_match), self.max_match)


def _sorted_places(tokens: np.ndarray, depth: int) -> np.ndarray:
    """Returns all places in the order of `Sorted.order`, of which `depth` tokens count."""
    count = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    known = 1  # tokens, counted back from a place, that its rank stands for
    while known < min(depth, count):
        before = np.concatenate([np.zeros(known, np.int64), rank[:-known]])
        rank = np.unique(rank * (count + 1) + before, return_inverse=True)[1].astype(np.int64) + 1
        known *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


def read(path: str, tokenizer) -> Store:
    """Returns a store of the texts of a file, JSON lines with `text`; InputError for another."""
    texts = []
    for number, record in jsonl.read(path):
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise InputError(
                f"{path}, line {number}: expected an object with a text, found {short_repr(record)}"
            )
        try:
            texts += [tokenizer.encode(text)] if text else []
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    store = Store(max(sum(len(text) + 1 for text in texts), 2))
    store.extend(texts)
    if not len(store):
        raise InputError(f"{path}: expected texts, found none")
    return store


def longest_match(store: Sorted, recent_P: Array) -> Array:
    """Returns how many of the last tokens stand together somewhere in the store, at most P.

    Args:
        store: the texts.
        recent_P: the last tokens of a row, the newest first; -1 before its first.
    """
    place = _first(store, recent_P, len(recent_P), after=False)
    size = len(store.order)
    near = jnp.stack([jnp.maximum(place - 1, 0), jnp.minimum(place, size - 1)])
    return jnp.max(jnp.stack([_common(store, recent_P, entry) for entry in near]))


def matches(store: Sorted, recent_P: Array, length: Array) -> tuple[Array, Array, Array]:
    """Returns where the matches of a length begin and end in `order`, and the next shorter length.

    The next shorter length is the greatest of which there are more matches; 0: none.
    """
    begin = _first(store, recent_P, length, after=False)
    end = _first(store, recent_P, length, after=True)
    size = len(store.order)
    above = jnp.where(begin > 0, _common(store, recent_P, jnp.maximum(begin - 1, 0)), 0)
    below = jnp.where(end < size, _common(store, recent_P, jnp.minimum(end, size - 1)), 0)
    return begin, end, jnp.maximum(above, below)


def _first(store: Sorted, recent_P: Array, length: Array | int, after: bool) -> Array:
    """Returns the first entry that is not below the last tokens, or is above them (`after`)."""

    def halve(bounds):
        low, high = bounds
        middle = (low + high) // 2
        common = jnp.minimum(_common(store, recent_P, middle), length)
        index = jnp.minimum(common, len(recent_P) - 1)
        own = _before(store, middle, index)
        smaller = jnp.where(common == length, after, own < recent_P[index])
        return jnp.where(smaller, middle + 1, low), jnp.where(smaller, high, middle)

    bounds = jnp.zeros((), jnp.int32), jnp.full((), len(store.order), jnp.int32)
    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, bounds)[0]


def _before(store: Sorted, entry: Array, back: Array) -> Array:
    """Returns the token so many tokens before an entry's place; -1 before the first."""
    place = store.order[entry] - back
    return jnp.where(place >= 0, store.tokens[jnp.maximum(place, 0)], -1)


def _common(store: Sorted, recent_P: Array, entry: Array) -> Array:
    """Returns how many of the last tokens stand at an entry's place and before it."""
    back = jnp.arange(len(recent_P))
    same = (_before(store, entry, back) == recent_P) & (recent_P >= 0)
    return jnp.sum(jnp.cumprod(same.astype(jnp.int32)))
