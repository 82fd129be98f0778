"""The errors that a user can cause, each with one line that names the thing."""

import reprlib


class InputError(ValueError):
    """Something given to spsjax is not usable: what it is, what was expected, what was found."""


class NonFiniteError(ArithmeticError):
    """A model gave a NaN or an infinity, so that no distribution can be formed."""


class Stopped(Exception):
    """A run was told to end, and did, with everything saved."""


def short_repr(value) -> str:
    """A value as a message shows it: `repr`, on one line, the middle of a long one left out."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return " ".join(short.repr(value).split())


def check_number(name: str, value, least: float, most: float, above: bool = False) -> None:
    """Raises InputError unless it is a finite number in [least, most], or above `least`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and least <= value <= most and not (above and value == least)):
        wanted = f"above {least:g}" if above else f"of {least:g} or more"
        wanted += f", at most {most:g}" if most < 1e30 else ""
        raise InputError(f"{name}: expected a finite number {wanted}, found {short_repr(value)}")


def one_line(error: Exception) -> str:
    """What an exception says, or its type where it says nothing, on one line."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__
