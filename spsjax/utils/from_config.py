"""Construction of objects from sections of a config file."""

from collections.abc import Callable

from spsjax.errors import InputError


def build(name: str, cls: Callable, options, **more):
    """`cls(**options, **more)`; raises InputError where it takes no such options."""
    try:
        return cls(**options, **more)
    except TypeError as error:
        found = str(error).rpartition("() ")[2]
        raise InputError(f"{name}: expected what {cls.__name__} takes, found {found}") from None
