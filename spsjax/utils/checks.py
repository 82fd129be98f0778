"""Checks of configuration values."""

from spsjax.errors import InputError, short_repr


def check_integer(name: str, value, least: int) -> None:
    """Raises InputError unless `value` is an integer of at least `least`.

    A bool is not taken for an integer, although Python derives one from the other.
    """
    if type(value) is not int or value < least:
        raise InputError(f"{name}: expected an integer >= {least}, found {short_repr(value)}")
