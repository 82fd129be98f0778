"""JSON files, with checks of the fields that are read."""

import json
import pathlib

from spsjax.errors import InputError, one_line, short_repr
from spsjax.utils import git_lfs

# Kinds of values: a description for messages, and a predicate. A bool is not an int here.
NUMBER = "an integer in [0, 2**31)", lambda x: type(x) is int and 0 <= x < 2**31
COUNT = "an integer in [1, 2**31)", lambda x: type(x) is int and 1 <= x < 2**31
EVEN = "an even integer in [2, 2**31)", lambda x: COUNT[1](x) and x % 2 == 0
POSITIVE = "a positive number", lambda x: type(x) in (int, float) and 0 < x < 1e30
TOKEN = "a token id", NUMBER[1]
TOKENS = (
    "one or more token ids",
    lambda x: all(map(NUMBER[1], x if type(x) is list else [x])),
)
FLAG = "true or false", lambda x: type(x) is bool
TEXT = "a text", lambda x: type(x) is str
LIST = "a list", lambda x: type(x) is list
OBJECT = "an object", lambda x: type(x) is dict


def read_json(path: pathlib.Path) -> dict:
    """Reads a JSON object from a file; raises InputError if that fails."""
    try:
        content = path.read_bytes()
        git_lfs.check(path, content)
        raw = json.loads(content.decode("utf-8"))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, found {one_line(error)}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


class Fields:
    """Fields of one JSON object, checked when they are read. A null counts as a missing field.

    Args:
        path: path of the file, for messages.
        raw: the JSON object.
        parent: name of the field whose value the object is; empty: the object is the whole file.
    """

    def __init__(self, path: pathlib.Path, raw: dict, parent: str = ""):
        self.path, self.raw, self.parent = path, raw, parent
        self.prefix = f"{parent}." * bool(parent)

    def get(self, name: str, kind, *default):
        """Returns the value of a field, or `default` if it is missing.

        Raises InputError if the value is of another kind, or if it is missing without a default.
        """
        value, (expected, is_valid) = self.raw.get(name), kind
        if value is None:
            if not default:
                raise InputError(
                    f"{self.path}: {self.prefix}{name}: expected {expected}, found none"
                )
            return default[0]
        if not is_valid(value):
            raise self.error(name, expected, value)
        return value

    def only(self, name: str, kind, supported) -> None:
        """Raises InputError unless a field has the supported value, which is also its default."""
        value = self.get(name, kind, supported)
        if value != supported:
            raise self.error(name, json.dumps(supported), value)

    def error(self, name: str, expected: str, value) -> InputError:
        """Returns an error about the value of a field."""
        return InputError(
            f"{self.path}: {self.prefix}{name}: expected {expected}, found {short_repr(value)}"
        )
