"""Training batches: windows over a token file, in an order that depends on the seed alone."""

import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from spsjax.errors import InputError, check_integer
from spsjax.types import PyTree
from spsjax.utils import extras

# Number of examples before a table ends, as grain wants a finite length. Mixing several tables
# multiplies their lengths, and the product must fit into a 64-bit integer.
_ENDLESS = 1 << 48


class TokenWindows:
    """Examples [N, length + 1] int32 over a sequence of tokens, read on demand.

    Neighbouring windows share one token, so that every token is a label exactly once. A last,
    partial window is dropped. `windows[3]` is one example, `windows[array]` are several.

    Args:
        tokens: the sequence.
        length: labels per example.
        name: name of the tokens in error messages.
        counts: [len(tokens)] 1 for tokens that count as labels, 0 for others; None: all count.
            Windows without a label that counts are dropped.

    Attributes:
        mask: windows over `counts`, aligned with the examples; None: all tokens count.
    """

    def __init__(self, tokens: Sequence[int], length: int, name: str = "tokens", counts=None):
        check_integer("length", length, 1)
        self.tokens, self.length = np.asanyarray(tokens), length
        check_token_count(name, len(self.tokens), length)
        self._rows, self.mask = None, None
        if counts is not None:
            self.mask = TokenWindows(counts, length, name)
            labels = self.mask.tokens[1 : 1 + len(self) * length].reshape(-1, length)
            self._rows = self.mask._rows = np.flatnonzero(labels.any(axis=1))
            if not len(self._rows):
                raise InputError(f"{name}: expected tokens of answers to train on, found none")

    @property
    def columns(self) -> dict[str, "TokenWindows"]:
        """Further columns of a table of these examples: `mask`, unless all tokens count."""
        return {} if self.mask is None else {"mask": self.mask}

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, rows) -> np.ndarray:
        rows = (np.arange(len(self)) if self._rows is None else self._rows)[rows]
        offsets = rows[..., None] * self.length + np.arange(self.length + 1)
        return self.tokens[offsets].astype(np.int32)


def check_token_count(name: str, count: int, length: int) -> None:
    """Raises InputError if there are too few tokens for one example."""
    if count < length + 1:
        expected = f"at least {length + 1} tokens, one example"
        raise InputError(f"{name}: expected {expected}, found {count}")


class Table:
    """Named arrays with one row per example; `table[rows]` is a dict of arrays."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows) -> dict[str, np.ndarray]:
        return {name: np.asarray(column[rows]) for name, column in self.columns.items()}


class BatchIterator:
    """An endless iterator over batches of one or several tables with the same columns.

    Within a table, every row occurs once per epoch. The order depends on the seed alone, not on the
    number of processes and devices, so that a run can be resumed on another mesh. `shares` of a
    batch, which add up to 1, come from the tables; `batch` counts the rows of all processes.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        shares: Sequence[float],
        batch: int,
        seed: int,
        batch_sharding: jax.sharding.Sharding,
    ):
        with extras.needed("train"):
            import grain

        self._tables, self._batch, self._sharding = tables, batch, batch_sharding
        # Rows of all tables are numbered through: table i has the rows from starts[i].
        self._starts = np.cumsum([0, *map(len, tables)])
        datasets = [
            grain.MapDataset.range(start, stop)
            .seed(seed + index)
            .shuffle()
            .repeat(_ENDLESS // max(1, stop - start))
            for index, (start, stop) in enumerate(itertools.pairwise(self._starts))
        ]
        mixed = datasets[0] if len(datasets) == 1 else grain.MapDataset.mix(datasets, shares)
        local = local_rows(batch_sharding, batch)
        batches = mixed.batch(batch).map(lambda rows: self._read(rows[local]))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self._iterator = iter(batches.to_iter_dataset(options))

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        return global_batch(next(self._iterator), self._batch, self._sharding)

    def state(self) -> dict:
        """Returns the position of the iterator, for `restore`."""
        return self._iterator.get_state()

    def restore(self, state: dict) -> None:
        """Moves to the position of another iterator over the same tables, batch size and seed."""
        self._iterator.set_state(state)

    def _read(self, rows: np.ndarray) -> PyTree:
        """Reads rows of any table, in their order."""
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        chunks = [
            self._tables[owner][rows[owners == owner] - self._starts[owner]]
            for owner in np.unique(owners)
        ]
        # The chunks hold the rows sorted by owner. The inverse permutation restores their order.
        order = np.argsort(np.argsort(owners, kind="stable"))
        return jax.tree.map(lambda *columns: np.concatenate(columns)[order], *chunks)


def local_rows(batch_sharding: jax.sharding.Sharding, batch: int) -> slice:
    """Returns the rows of a batch on the devices of this process."""
    slices = [
        rows for rows, *_ in batch_sharding.addressable_devices_indices_map((batch,)).values()
    ]
    starts, stops = zip(*(rows.indices(batch)[:2] for rows in slices))
    return slice(min(starts), max(stops))


def global_batch(rows: PyTree, batch: int, batch_sharding: jax.sharding.Sharding) -> PyTree:
    """Returns a batch on all devices from the rows of every process (`local_rows`)."""
    return jax.tree.map(
        lambda column: jax.make_array_from_process_local_data(
            batch_sharding, column, (batch, *column.shape[1:])
        ),
        rows,
    )
