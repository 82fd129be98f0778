"""Records of a measurement with unique keys, in memory or in a file that survives a kill."""

import json
import pathlib
from collections.abc import Hashable

from spsjax.errors import InputError, one_line, short_repr
from spsjax.utils import jsonl


class Records:
    """Records in memory, in the order in which they were added.

    Args:
        key: names of the fields that identify a record.

    Attributes:
        records: all records.
    """

    def __init__(self, key: tuple[str, ...]):
        self._key = key
        self.records: list[dict] = []
        self._by_key: dict[Hashable, dict] = {}

    def __contains__(self, key: tuple) -> bool:
        return tuple(key) in self._by_key

    def __getitem__(self, key: tuple) -> dict:
        return self._by_key[tuple(key)]

    def add(self, record: dict) -> None:
        """Adds a record; raises ValueError if its key exists."""
        self._by_key[self._new_key(record)] = record
        self.records.append(record)

    def _new_key(self, record: dict) -> tuple:
        key = tuple(record[name] for name in self._key)
        if key in self._by_key:
            raise ValueError(f"a second record with the key {short_repr(list(key))}")
        return key


class Journal(Records):
    """Records in a JSON-lines file, from which an interrupted measurement resumes.

    The first line of the file holds the config on which the records depend.

    Args:
        path: path of the file; its folder is created if necessary.
        config: settings on which the records depend. A file with another config is refused.
        key: names of the fields that identify a record.
        writes: False in a process that only reads the file, which another process writes.

    Raises:
        InputError: the file has another config, is not a journal, or cannot be written.
    """

    def __init__(
        self, path: str | pathlib.Path, config: dict, key: tuple[str, ...], writes: bool = True
    ):
        super().__init__(key)
        self.path, self._writes = pathlib.Path(path), writes
        config = json.loads(json.dumps(config))  # tuples become lists, as in the file
        try:
            self._open({"config": config})
        except OSError as error:
            raise InputError(f"{path}: expected a journal, found {one_line(error)}") from None
        if not self.path.exists():  # a process that does not write, before the first record
            return
        for number, record in jsonl.read(self.path, allow_torn=True):
            if number == 1:
                continue
            try:
                super().add(record)
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path}, line {number}: expected a record, found {one_line(error)}"
                ) from None

    def _open(self, header: dict) -> None:
        """Checks the first line, and repairs a file whose writer was killed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        first = b""
        if self.path.exists():
            with open(self.path, "rb") as file:
                first = file.readline()
        whole = first.endswith(b"\n")
        if whole:
            self._check(first, header["config"])
        elif not jsonl.to_line(header).startswith(first):
            raise InputError(
                f"{self.path}: expected a journal, found another file. Choose another folder."
            )
        if self._writes:
            if first:
                jsonl.drop_torn_line(self.path)
            if not whole:
                jsonl.append(self.path, header)

    def _check(self, line: bytes, config: dict) -> None:
        """Raises InputError unless the first line of the file holds this config."""
        try:
            stored = json.loads(line)["config"]
            changed = _changed(config, stored)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.path}, line 1: expected a journal's config, found {one_line(error)}"
            ) from None
        for name in changed:
            if name not in stored or name not in config:
                expected = f"a config with {name}" if name in config else f"a config without {name}"
                actual = "a journal without it" if name in config else "a journal with it"
            else:
                expected, actual = config[name], stored[name]
                if isinstance(expected, dict) and isinstance(actual, dict):
                    fields = _changed(expected, actual)
                    expected, actual = (
                        {field: values[field] for field in fields if field in values}
                        for values in (expected, actual)
                    )
                expected = f"{name} {short_repr(expected)}"
                actual = f"a journal with {short_repr(actual)}"
            raise InputError(
                f"{self.path}: expected {expected}, found {actual}. "
                "Restore the value or choose another folder."
            )

    def add(self, record: dict) -> None:
        """Adds a record; it is on the disk when this returns."""
        self._new_key(record)
        if self._writes:
            jsonl.append(self.path, record)
        super().add(record)


def _changed(one: dict, other: dict) -> list[str]:
    """Returns the names of fields that differ, or that only one of two dicts has.

    The order is that of the first dict, because the first fields of a config are the plainest.
    """
    return [
        name
        for name in one | other
        if (name in one) != (name in other) or one.get(name) != other.get(name)
    ]
