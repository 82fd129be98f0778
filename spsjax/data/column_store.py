"""Columns of a table that are dear to compute: computed once, batch by batch, and kept in files."""

import contextlib
import io
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from spsjax.errors import InputError, one_line
from spsjax.parallel import multihost
from spsjax.utils import atomic_files

# How much work may be lost, in seconds.
_LOSS = 10


def columns(
    path: pathlib.Path,
    count: int,
    batch: int,
    compute: Callable[[int], dict[str, np.ndarray]],
    what: str,
) -> dict[str, np.ndarray]:
    """Columns of `count` rows, read from files as needed, which are made first if need be.

    What is killed on the way goes on where it was. Of several runs that want the same, one makes
    it, and the others wait.

    Args:
        path: the folder, whose name tells all that the columns depend on; one `.npy` a column.
        count: rows.
        batch: rows that are computed at once.
        compute: a row's number -> the columns of the batch that begins there, the same in every
            process. Rows that are too many are left out.
        what: it is, for the bar.

    Raises:
        InputError: a file is damaged.
    """
    if not multihost.all_true(path.is_dir()):
        try:
            _make(path, count, batch, compute, what)
        except OSError as error:
            error.filename = error.filename or str(path)  # of a full disk
            raise
        multihost.barrier(f"{path.name} made")
    found = {}
    for file in sorted(path.glob("*.npy")):
        try:
            found[file.stem] = np.load(file, mmap_mode="r")
            if len(found[file.stem]) != count:
                raise ValueError(f"{len(found[file.stem])}")
        except (OSError, ValueError, EOFError) as error:
            raise InputError(
                f"{file}: expected {count} rows that were kept, or no such folder, "
                f"found {one_line(error)}"
            ) from None
    if not found:
        raise InputError(f"{path}: expected columns that were kept, or no such folder, found none")
    return found


def _make(path, count, batch, compute, what) -> None:
    partial = path.with_name(f".{path.name}.partial")
    first, done = multihost.is_main_process(), 0
    with contextlib.ExitStack() as stack:
        if first:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(atomic_files.lock(path.with_name(f".{path.name}.lock")))
            done = count if path.is_dir() else _done(partial)
        done = multihost.broadcast_int(done)
        if done == count:
            return
        bar = tqdm(desc=what, total=count, initial=done, unit="row", disable=not first)
        outputs, noted = {}, time.monotonic()
        for start in range(done, count, batch):
            part = compute(start)
            bar.update(min(batch, count - start))
            if not first:
                continue
            for name, column in part.items():
                column = np.ascontiguousarray(column[: count - start])
                if name not in outputs:
                    partial.mkdir(exist_ok=True)
                    file = _opened(partial / f"{name}.npy", column, count, start)
                    outputs[name] = stack.enter_context(file)
                outputs[name].write(column.tobytes())
            if start + batch < count and time.monotonic() - noted >= _LOSS:
                for file in outputs.values():
                    file.flush()
                    os.fsync(file.fileno())
                atomic_files.write(partial / "rows", str(start + batch))
                noted = time.monotonic()
        bar.close()
        if first:
            for file in outputs.values():
                file.close()
            (partial / "rows").unlink(missing_ok=True)
            partial.rename(path)


def _done(partial: pathlib.Path) -> int:
    """How many rows are there already."""
    try:
        return int((partial / "rows").read_text())
    except (OSError, ValueError):
        return 0


def _opened(path: pathlib.Path, column: np.ndarray, count: int, start: int):
    """The file of a column of `count` rows like these, where row `start` goes."""
    header = io.BytesIO()
    kind = np.lib.format.dtype_to_descr(column.dtype)
    shape = {"descr": kind, "fortran_order": False, "shape": (count, *column.shape[1:])}
    np.lib.format.write_array_header_1_0(header, shape)
    header = header.getvalue()
    file = open(path, "r+b" if start else "wb")  # noqa: SIM115 (the caller's)
    if start:
        at = len(header) + start * column[0].nbytes
        if file.read(len(header)) != header or os.path.getsize(path) < at:
            raise InputError(
                f"{path}: expected {start} rows of {count}, or no such folder, found others"
            )
        file.seek(at)
        file.truncate()
    else:
        file.write(header)
    return file
