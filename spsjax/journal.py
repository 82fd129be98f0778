"""Records in a JSON-lines file, each there once, whatever ends the process that writes them."""

import json
import os
import pathlib
from collections.abc import Hashable

from spsjax import files
from spsjax.errors import InputError, brief, one_line


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
            if writes and not raw.endswith(b"\n"):  # what ended the process cut the last line off
                raw = raw[: raw.rfind(b"\n") + 1]
                files.write(self.path, raw)
            lines = raw.decode("utf-8").splitlines()
            if not lines:
                self._write({"config": config})
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: expected a journal, found {one_line(error)}") from None
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number == 1:
                    found = record["config"]
                else:
                    self._keep(record)
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path}, line {number}: expected a record, found {one_line(error)}"
                ) from None
            if number == 1 and found != config:
                names = sorted(
                    name for name in {*found, *config} if found.get(name) != config.get(name)
                )
                raise InputError(
                    f"{path}: expected {names[0]} {brief(config.get(names[0]))}, "
                    f"found a journal of {brief(found.get(names[0]))}"
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
            raise ValueError(f"a second record of {brief(list(key))}")
        self._known[key] = record
        self.records.append(record)

    def _write(self, record: dict) -> None:
        if not self._writes:
            return
        with open(self.path, "ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
