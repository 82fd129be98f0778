"""Records in a JSON-lines file, each there once, whatever ends the process that writes them."""

import json
import os
import pathlib
from collections.abc import Hashable

from spsjax.errors import InputError, one_line, short_repr
from spsjax.utils import atomic_files


class Journal:
    """What a long measurement has found so far; whoever opens it again goes on from there.

    Args:
        path: the file. Its first line is `config`; one that was made by another config is refused.
        config: what the records depend on.
        key: fields that tell one record from any other.
        writes: False for a process that shares the file of another, and only keeps records.

    Attributes:
        records: all that are there, in the order in which they came.

    Raises:
        InputError: another config, a line that is no record, or a file that cannot be written.
    """

    def __init__(
        self, path: str | pathlib.Path, config: dict, key: tuple[str, ...], writes: bool = True
    ):
        self.path, self._key, self._writes = pathlib.Path(path), key, writes
        self.records: list[dict] = []
        self._known: dict[Hashable, dict] = {}
        config = json.loads(json.dumps(config))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            raw = self.path.read_bytes() if self.path.exists() else b""
            whole = raw[: raw.rfind(b"\n") + 1]  # what ended the process may have cut a line off
            first, *lines = whole.decode("utf-8").splitlines() or [""]
            if whole:
                self._check(first, config)
            elif not _line({"config": config}).startswith(raw):
                raise InputError(f"{path}: expected a journal, found another file")
            if writes and whole != raw:
                atomic_files.write(self.path, whole)
            if not whole:
                self._write({"config": config})
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: expected a journal, found {one_line(error)}") from None
        for number, line in enumerate(lines, 2):
            try:
                self._keep(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path}, line {number}: expected a record, found {one_line(error)}"
                ) from None

    def _check(self, line: str, config: dict) -> None:
        """Raises InputError where the first line is not that of this config."""
        try:
            found = json.loads(line)["config"]
            changed = [name for name in {*found, *config} if found.get(name) != config.get(name)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.path}, line 1: expected a journal's config, found {one_line(error)}"
            ) from None
        for name in sorted(changed):
            ours, theirs = config.get(name), found.get(name)
            if isinstance(ours, dict) and isinstance(theirs, dict):  # what differs, not all of it
                fields = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
                ours, theirs = (
                    {key: each.get(key) for key in sorted(fields)} for each in (ours, theirs)
                )
            raise InputError(
                f"{self.path}: expected {name} {short_repr(ours)}, "
                f"found a journal of {short_repr(theirs)}"
            )

    def __contains__(self, key: tuple) -> bool:
        return tuple(key) in self._known

    def __getitem__(self, key: tuple) -> dict:
        return self._known[tuple(key)]

    def add(self, record: dict) -> None:
        """Appends a record, and returns when it is on the disk."""
        if tuple(record[name] for name in self._key) in self._known:
            raise ValueError(f"a record of {[record[name] for name in self._key]} is there already")
        self._write(record)
        self._keep(record)

    def _keep(self, record: dict) -> None:
        key = tuple(record[name] for name in self._key)
        if key in self._known:
            raise ValueError(f"a second record of {short_repr(list(key))}")
        self._known[key] = record
        self.records.append(record)

    def _write(self, record: dict) -> None:
        if not self._writes:
            return
        with open(self.path, "ab") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())


def _line(record: dict) -> bytes:
    return json.dumps(record).encode() + b"\n"
