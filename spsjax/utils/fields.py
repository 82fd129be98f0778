"""Fields of dataclasses that say which values they take, checked when an object is made."""

import dataclasses
import functools

from spsjax.errors import check_flag, check_integer, check_number

_CHECK = "check of the value"  # key in a field's metadata


class Checked:
    """Base class of dataclasses with checked fields. `__post_init__` raises InputError."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if check := field.metadata.get(_CHECK):
                check(field.name, getattr(self, field.name))


def integer(default=dataclasses.MISSING, least=0, most=None, **options):
    """Returns a field for an integer in [least, most]; `options` are of `dataclasses.field`."""
    return _field(functools.partial(check_integer, least=least, most=most), default, **options)


def number(default=dataclasses.MISSING, least=0, most=1e30, above=False, **options):
    """Returns a field for a finite number in [least, most], without `least` if `above`."""
    check = functools.partial(check_number, least=least, most=most, above=above)
    return _field(check, default, **options)


def flag(default):
    """Returns a field for a bool."""
    return _field(check_flag, default)


def _field(check, default, metadata=None, **options):
    metadata = {_CHECK: check, **(metadata or {})}
    return dataclasses.field(default=default, metadata=metadata, **options)
