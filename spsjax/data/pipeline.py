"""Examples: windows over a file of tokens, in an order that depends on the seed alone."""

import itertools
from collections.abc import Iterator, Sequence

import grain
import jax
import numpy as np

from spsjax.errors import InputError
from spsjax.types import PyTree

# Examples: fewer than a machine's integers count, also when several tables are mixed.
_FOR_EVER = 1 << 48


class Windows:
    """[N, length + 1] int32 examples over a row of tokens, read as they are asked for.

    Neighbours share one token, so that every token is a label once; a last, partial window is left
    out. `windows[3]` is one, `windows[array]` are several.
    """

    def __init__(self, tokens: Sequence[int], length: int, name: str = "tokens"):
        if length < 1:
            raise InputError(f"length: expected at least 1, found {length}")
        self.tokens, self.length = np.asanyarray(tokens), length
        check_tokens(name, len(self.tokens), length)

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, rows) -> np.ndarray:
        rows = np.arange(len(self))[rows]
        offsets = rows[..., None] * self.length + np.arange(self.length + 1)
        return self.tokens[offsets].astype(np.int32)


def check_tokens(name: str, count: int, length: int) -> None:
    """Raises InputError where there are too few tokens for one example."""
    if count < length + 1:
        expected = f"at least {length + 1} tokens, one example"
        raise InputError(f"{name}: expected {expected}, found {count}")


class Table:
    """Arrays side by side, one row an example: `table[rows]` is a dict of arrays."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows) -> dict[str, np.ndarray]:
        return {name: np.asarray(column[rows]) for name, column in self.columns.items()}


class Feed:
    """Batches of one table or of several, for ever; each row is seen once before any comes again.

    Args:
        tables: of the same columns.
        shares: of each table, how much of a batch comes from it; they add up to 1.
        batch: rows of all processes together.
        seed: of the order, which is the same however many processes and devices share a batch, so
            that a run can go on with others.
        place: where the rows go.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        shares: Sequence[float],
        batch: int,
        seed: int,
        place: jax.sharding.Sharding,
    ):
        self._tables, self._batch, self._place = tables, batch, place
        starts = np.cumsum([0, *map(len, tables)])
        parts = [
            grain.MapDataset.range(start, stop)
            .seed(seed + index)
            .shuffle()
            .repeat(_FOR_EVER // max(1, stop - start))
            for index, (start, stop) in enumerate(itertools.pairwise(starts))
        ]
        mixed = parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, shares)
        mine = local_rows(place, batch)
        local = mixed.batch(batch).map(lambda rows: self._read(rows[mine]))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self._iterator = iter(local.to_iter_dataset(options))

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        return put(next(self._iterator), self._batch, self._place)

    def state(self) -> dict:
        """What `restore` takes to go on from here."""
        return self._iterator.get_state()

    def restore(self, state: dict) -> None:
        """Goes on from where another feed of the same tables, batch and seed was."""
        self._iterator.set_state(state)

    def _read(self, rows: np.ndarray) -> PyTree:
        starts = np.cumsum([0, *map(len, self._tables)])
        owners = np.searchsorted(starts, rows, side="right") - 1
        parts = [
            self._tables[owner][rows[owners == owner] - starts[owner]]
            for owner in np.unique(owners)
        ]
        back = np.argsort(np.argsort(owners, kind="stable"))
        return jax.tree.map(lambda *columns: np.concatenate(columns)[back], *parts)


def local_rows(place: jax.sharding.Sharding, batch: int) -> slice:
    """Which rows of a batch the devices of this process hold."""
    slices = [rows for rows, *_ in place.addressable_devices_indices_map((batch,)).values()]
    starts, stops = zip(*(rows.indices(batch)[:2] for rows in slices))
    return slice(min(starts), max(stops))


def put(rows: PyTree, batch: int, place: jax.sharding.Sharding) -> PyTree:
    """A batch on its devices, of the rows of it that this process holds."""
    return jax.tree.map(
        lambda column: jax.make_array_from_process_local_data(
            place, column, (batch, *column.shape[1:])
        ),
        rows,
    )
