"""Files of JSON objects, one per line, read a line at a time."""

import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator

from spsjax.errors import InputError, one_line, short_repr


def is_named(path: pathlib.Path) -> bool:
    """Returns whether a file has the name of one with JSON objects."""
    return path.name.removesuffix(".gz").endswith(".jsonl")


def read(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
    """Yields the number and the JSON object of each line of a file that is not blank.

    Raises InputError if the file cannot be read, or for a line that is not an object.
    """
    offset, number = 0, 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                offset += len(raw)
                if line.strip():
                    yield number, _object(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        position = f"an invalid byte at {offset + error.start}"
        raise InputError(f"{path}: expected text in UTF-8, found {position}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: expected a text file, found {one_line(error)}") from None


def _object(line: str, where: str) -> dict:
    """Returns a JSON object; raises InputError that names the line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected a JSON object, found {one_line(error)}") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, found {short_repr(record)}")
    return record
