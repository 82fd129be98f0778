"""Datastores for look-up drafting: finished outputs, or a corpus (REST, arXiv 2311.08252)."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax.errors import InputError, check_integer, short_repr
from spsjax.tokenization.base import Tokenizer
from spsjax.types import AnyArray, Array, pytree_dataclass
from spsjax.utils import jsonl


@pytree_dataclass
class Sorted:
    """Tokens of some texts, with a suffix array that is sorted backwards.

    Attributes:
        tokens: [C] int32; -1 between texts and after the last text.
        order: [C] int32, all positions, sorted by their token, then by the previous token, and so
            on for `max_match` tokens.
        max_match: longest match that can be looked up.
    """

    tokens: AnyArray
    order: AnyArray
    max_match: int = dataclasses.field(metadata={"static": True})


class Store:
    """Datastore of texts. When it is full, the oldest texts are removed.

    Give each tenant a store of its own: the speed of a call reveals which texts a store contains.

    Args:
        capacity: number of tokens; every text takes one more than it has. A text that is too long
            loses its beginning.
        max_match: longest match that can be looked up.
    """

    def __init__(self, capacity: int = 2**17, max_match: int = 16) -> None:
        check_integer("capacity", capacity, 2, 2**30)
        check_integer("max_match", max_match, 1)
        self.capacity, self.max_match = capacity, max_match
        self._texts: collections.deque[np.ndarray] = collections.deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds the end of a text that fits; raises InputError unless `tokens` are token ids."""
        try:
            ids = np.asarray(tokens)
        except ValueError:
            ids = np.asarray(None)
        integers = ids.ndim == 1 and (not ids.size or np.issubdtype(ids.dtype, np.integer))
        if not integers or (ids.size and not 0 <= ids.min() <= ids.max() < 2**31):
            raise InputError(f"tokens: expected token ids, found {short_repr(tokens)}")
        if not ids.size:
            return
        text = ids[-(self.capacity - 1) :].astype(np.int32)
        self._texts.append(text)
        self._size += len(text) + 1
        while self._size > self.capacity:
            self._size -= len(self._texts.popleft()) + 1

    def extend(self, texts: Iterable[Sequence[int]]) -> None:
        """Adds several texts in the way of `add`."""
        if not isinstance(texts, Iterable):
            raise InputError(f"texts: expected several texts, found {short_repr(texts)}")
        for tokens in texts:
            self.add(tokens)

    def sorted(self) -> Sorted:
        """Returns the texts as NumPy arrays.

        Their shapes depend on the capacity alone, so that new texts compile nothing.
        """
        tokens = np.full(self.capacity, -1, np.int32)
        end = 0
        for text in self._texts:
            tokens[end : end + len(text)] = text
            end += len(text) + 1
        return Sorted(tokens, _sorted_positions(tokens, self.max_match), self.max_match)


def _sorted_positions(tokens: np.ndarray, depth: int) -> np.ndarray:
    """Returns all positions in the order of `Sorted.order`, which compares `depth` tokens.

    It uses prefix doubling: the rank by 2n tokens follows from two ranks by n tokens.
    """
    count = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    compared = 1  # number of tokens up to a position by which it is ranked
    while compared < min(depth, count):
        before = np.concatenate([np.zeros(compared, np.int64), rank[:-compared]])
        rank = np.unique(rank * (count + 1) + before, return_inverse=True)[1].astype(np.int64) + 1
        compared *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


def read(path: str, tokenizer: Tokenizer) -> Store:
    """Reads a store from JSON lines with a field `text`; raises InputError for other files."""
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
    """Returns the length of the longest suffix of a row that occurs in the store, at most P.

    Args:
        store: texts.
        recent_P: last tokens of a row, the newest first; -1 before the first token.
    """
    # In a sorted order, the longest match is next to the entry at which the row would be inserted.
    entry = _first(store, recent_P, len(recent_P), after=False)
    size = len(store.order)
    neighbours = jnp.stack([jnp.maximum(entry - 1, 0), jnp.minimum(entry, size - 1)])
    return jnp.max(jnp.stack([_common(store, recent_P, entry) for entry in neighbours]))


def matches(store: Sorted, recent_P: Array, length: Array) -> tuple[Array, Array, Array]:
    """Returns the range in `order` of the matches of a length, and the next shorter length.

    The next shorter length is the greatest one with more matches; 0: there is none.
    """
    begin = _first(store, recent_P, length, after=False)
    end = _first(store, recent_P, length, after=True)
    size = len(store.order)
    # A shorter match that is not in the range begins just outside of it.
    above = jnp.where(begin > 0, _common(store, recent_P, jnp.maximum(begin - 1, 0)), 0)
    below = jnp.where(end < size, _common(store, recent_P, jnp.minimum(end, size - 1)), 0)
    return begin, end, jnp.maximum(above, below)


def _first(store: Sorted, recent_P: Array, length: Array | int, after: bool) -> Array:
    """Returns the first entry that is not less than the row's last tokens, by binary search.

    With `after`, returns the first entry that is greater. Only `length` tokens are compared.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        common = jnp.minimum(_common(store, recent_P, middle), length)
        index = jnp.minimum(common, len(recent_P) - 1)
        differing = _before(store, middle, index)
        smaller = jnp.where(common == length, after, differing < recent_P[index])
        return jnp.where(smaller, middle + 1, low), jnp.where(smaller, high, middle)

    bounds = jnp.zeros((), jnp.int32), jnp.full((), len(store.order), jnp.int32)
    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, bounds)[0]


def _before(store: Sorted, entry: Array, back: Array) -> Array:
    """Returns the token `back` positions before an entry's position; -1 before the first token."""
    position = store.order[entry] - back
    return jnp.where(position >= 0, store.tokens[jnp.maximum(position, 0)], -1)


def _common(store: Sorted, recent_P: Array, entry: Array) -> Array:
    """Returns the length of the common suffix of the row and the text up to an entry's position."""
    back = jnp.arange(len(recent_P))
    same = (_before(store, entry, back) == recent_P) & (recent_P >= 0)
    return jnp.sum(jnp.cumprod(same.astype(jnp.int32)))
