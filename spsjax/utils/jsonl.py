"""JSON-lines files: reading with line numbers, durable appending, and repair after a crash."""

import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Iterator

from spsjax.errors import InputError, one_line

_BLOCK = 1 << 16  # bytes


def read(path: str | pathlib.Path, allow_torn: bool = False) -> Iterator[tuple[int, object]]:
    """Yields the line number and the value of each line that is not blank.

    Args:
        path: path of the file; files with the suffix `.gz` are decompressed.
        allow_torn: whether a last line without a newline is skipped. A process that is writing, or
            was killed while writing, leaves an incomplete line.

    Raises:
        InputError: the file cannot be read, or a line is not JSON.
    """
    path = pathlib.Path(path)
    number, reading = 0, True
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if allow_torn and not line.endswith(b"\n"):
                    return
                reading = False
                if line.strip():
                    yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                reading = True
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        line_number = number + reading  # a failed read concerns the line after the last good one
        where = f"{path}, line {line_number}" if number else f"{path}"
        text = one_line(error)
        if isinstance(error, json.JSONDecodeError):  # its own text counts lines within the line
            text = f"{error.msg} at column {error.colno}"
        raise InputError(f"{where}: expected JSON lines, found {text}") from None


def to_line(record: object) -> bytes:
    """Returns one line of JSON; raises ValueError for NaN or infinity, which JSON does not have."""
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def append(path: str | pathlib.Path, record: object) -> None:
    """Appends one record and waits until it is on the disk."""
    line = to_line(record)
    with open(path, "ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def drop_torn_line(path: str | pathlib.Path) -> None:
    """Removes a last line without a newline, which a killed process may have left."""
    with open(path, "r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:  # from the end, a block at a time: the file may be larger than the memory
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
