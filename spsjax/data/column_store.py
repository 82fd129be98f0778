"""Caches expensive per-example arrays on disk: computed once, in batches, and resumable."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np

from spsjax.errors import InputError, one_line
from spsjax.parallel import multihost
from spsjax.utils import atomic_files
from spsjax.utils.progress import Bar

_SAVE_SECONDS = 10  # time between two saves, hence the most work that a kill can lose


def cached_columns(
    path: pathlib.Path,
    count: int,
    batch: int,
    compute: Callable[[int], dict[str, np.ndarray]],
    label: str,
) -> dict[str, np.ndarray]:
    """Returns memory-mapped columns of `count` rows, computing them first if they are missing.

    An interrupted computation resumes from the last saved batch. If several processes need the same
    cache, one computes it and the others wait.

    Args:
        path: folder of the cache, with one `.npy` file per column. Its name identifies everything
            that the columns depend on.
        count: number of rows.
        batch: rows per call of `compute`.
        compute: function from the first row of a batch to its columns. It returns the same arrays
            in every process. Rows beyond `count` are dropped.
        label: text on the progress bar.

    Raises:
        InputError: a file is damaged.
        OSError: the disk is full.
    """
    if not multihost.all_true(path.is_dir()):
        try:
            _compute_all(path, count, batch, compute, label)
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk gives no path
            raise
        multihost.barrier(f"{path.name} computed")
    columns = {}
    for file in sorted(path.glob("*.npy")):
        try:
            columns[file.stem] = np.load(file, mmap_mode="r")
            if len(columns[file.stem]) != count:
                raise ValueError(f"{len(columns[file.stem])}")
        except (OSError, ValueError, EOFError) as error:
            raise InputError(
                f"{file}: expected {count} cached rows, found {one_line(error)}. "
                f"Delete {path} to compute them again"
            ) from None
    if not columns:
        raise InputError(
            f"{path}: expected cached columns, found none. Delete the folder to compute them again"
        )
    return columns


def _compute_all(path: pathlib.Path, count: int, batch: int, compute, label: str) -> None:
    """Computes all columns in a hidden folder, which gets its name once they are complete."""
    writes = multihost.is_main_process()
    partial = _PartialColumns(path.with_name(f".{path.name}.partial"), count)
    with contextlib.ExitStack() as stack:
        done = 0
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(atomic_files.lock(path.with_name(f".{path.name}.lock")))
            done = count if path.is_dir() else partial.rows_done()
        done = multihost.broadcast_int(done)
        if done == count:  # another run computed them while this one waited for the lock
            return
        bar = Bar(desc=label, total=count, initial=done, unit="row", disable=not writes)
        stack.enter_context(bar)
        saved = time.monotonic()
        for start in range(done, count, batch):
            columns = compute(start)
            stop = min(start + batch, count)
            if writes:
                partial.write(start, stop, columns, resumed=done > 0)
                if time.monotonic() - saved >= _SAVE_SECONDS and stop < count:
                    partial.save(stop)
                    saved = time.monotonic()
            bar.update(stop - start)
        if writes:
            partial.finish(path)


class _PartialColumns:
    """Columns under construction: memory-mapped files, and a counter of finished rows."""

    def __init__(self, folder: pathlib.Path, count: int):
        self._folder, self._counter, self._count = folder, folder / "rows", count
        self._maps: dict[str, np.memmap] = {}

    def rows_done(self) -> int:
        """Returns how many rows an interrupted computation has saved."""
        try:
            return int(self._counter.read_text())
        except (OSError, ValueError):
            return 0

    def write(self, start: int, stop: int, columns: dict[str, np.ndarray], resumed: bool) -> None:
        """Writes the rows from `start` to `stop`, in files of an earlier run if it is resumed."""
        for name, column in columns.items():
            if name not in self._maps:
                self._maps[name] = self._open(name, column, start, resumed)
            self._maps[name][start:stop] = column[: stop - start]

    def save(self, rows: int) -> None:
        """Writes all rows to the disk, then their number."""
        for column in self._maps.values():
            column.flush()
        atomic_files.write(self._counter, str(rows))

    def finish(self, path: pathlib.Path) -> None:
        """Writes all rows to the disk and gives the folder its final name."""
        for column in self._maps.values():
            column.flush()
        self._maps.clear()
        self._counter.unlink(missing_ok=True)
        self._folder.rename(path)

    def _open(self, name: str, column: np.ndarray, start: int, resumed: bool) -> np.memmap:
        """Opens the file of a column, and creates it unless the computation is resumed."""
        file = self._folder / f"{name}.npy"
        shape = self._count, *column.shape[1:]
        if not resumed:
            self._folder.mkdir(exist_ok=True)
            rows = np.lib.format.open_memmap(file, "w+", column.dtype, shape)
            _allocate(file)
            return rows
        try:
            # Opened for reading first: for writing, NumPy would extend a file that is too short.
            rows = np.load(file, mmap_mode="r")
            if (rows.dtype, rows.shape) != (column.dtype, shape):
                raise ValueError(f"{rows.dtype} {rows.shape}")
        except (OSError, ValueError) as error:
            raise InputError(
                f"{file}: expected {start} saved rows of {self._count}, found {one_line(error)}. "
                f"Delete {self._folder} to compute them again"
            ) from None
        return np.lib.format.open_memmap(file, "r+")


def _allocate(file: pathlib.Path) -> None:
    """Reserves the disk space of a file; raises OSError if the disk is too full.

    Without it, writing to the mapped memory of a sparse file on a full disk kills the process with
    SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with open(file, "r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, os.path.getsize(file))
