"""Errors that a user can cause, with one-line messages, and checks of inputs."""

import difflib
import os
import pathlib
import reprlib
from collections.abc import Iterable

import numpy as np


class InputError(ValueError):
    """An argument, file or config value that cannot be used. Its message is one line."""


class NonFiniteError(ArithmeticError):
    """A NaN or an infinity in a model's logits, from which no distribution can be formed."""


class Stopped(Exception):
    """The end of a run that received a stop signal and has saved its state."""


def short_repr(value) -> str:
    """Returns `repr(value)` on one line for a message; the middle of a long one is cut out."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return " ".join(short.repr(value).split())


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns ". Did you mean X?" with the known name that is most like a name, or "" for none.

    It is the end of a message. The known name is shown behind `prefix`.
    """
    near = difflib.get_close_matches(name, [*known], 1)
    return f". Did you mean {prefix}{near[0]}?" if near else ""


def check_integer(name: str, value, least: int, most: int | None = None) -> None:
    """Raises InputError unless `value` is an integer in [least, most]; a bool is not an integer."""
    if type(value) is int and least <= value and (most is None or value <= most):
        return
    bound = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    raise InputError(f"{name}: expected {bound}, found {short_repr(value)}")


def check_flag(name: str, value) -> None:
    """Raises InputError unless `value` is a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name}: expected True or False, found {short_repr(value)}")


def check_path(name: str, value) -> None:
    """Raises InputError unless `value` is a valid path of a file.

    An empty text is refused, because it would mean the current folder.
    """
    if not isinstance(value, (str, pathlib.Path)):
        raise InputError(f"{name}: expected a text or a path, found {type(value).__name__}")
    try:
        raw = os.fsencode(value)  # takes surrogates that stand for bytes of a file's name
    except UnicodeEncodeError:
        raw = b""
    if not raw or b"\0" in raw:
        raise InputError(f"{name}: expected a path, found {short_repr(str(value))}")


def check_number(name: str, value, least: float, most: float, above: bool = False) -> None:
    """Raises InputError unless `value` is a finite number in [least, most].

    With `above`, `least` itself is excluded.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and least <= value <= most and not (above and value == least)):
        wanted = f"above {least:g}" if above else f"of {least:g} or more"
        wanted += f", at most {most:g}" if most < 1e30 else ""
        raise InputError(f"{name}: expected a finite number {wanted}, found {short_repr(value)}")


def one_line(error: BaseException) -> str:
    """Returns an exception's message on one line, or its type if it has no message."""
    return printable(getattr(error, "strerror", None) or str(error)) or type(error).__name__


def printable(text: str) -> str:
    r"""Returns a text on one line, with escapes such as `\x1b` for unprintable characters.

    Messages quote downloaded files, and a terminal would obey their control characters.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in " ".join(text.split())
    )
