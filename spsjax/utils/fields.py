"""Fields of dataclasses that say which values they take, checked when an object is made."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from spsjax.errors import check_flag, check_integer, check_number

_CHECK = "check of the value"  # key in a field's metadata


class Checked:
    """Base class of dataclasses with checked fields. `__post_init__` raises InputError."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # every concrete class is one

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if check := field.metadata.get(_CHECK):
                check(field.name, getattr(self, field.name))


def integer(
    default: Any = dataclasses.MISSING, least: int = 0, most: int | None = None, **options: Any
) -> Any:
    """Returns a field for an integer in [least, most]; `options` are of `dataclasses.field`."""
    return _field(functools.partial(check_integer, least=least, most=most), default, **options)


def number(
    default: Any = dataclasses.MISSING,
    least: float = 0,
    most: float = 1e30,
    above: bool = False,
    **options: Any,
) -> Any:
    """Returns a field for a finite number in [least, most], without `least` if `above`."""
    check = functools.partial(check_number, least=least, most=most, above=above)
    return _field(check, default, **options)


def flag(default: bool) -> Any:
    """Returns a field for a bool."""
    return _field(check_flag, default)


def derived() -> Any:
    """Returns a field that is computed from the others by `__post_init__`, where it is None."""
    return dataclasses.field(default=None)


def _field(
    check: Callable, default: Any, metadata: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    metadata = {_CHECK: check, **(metadata or {})}
    return dataclasses.field(default=default, metadata=metadata, **options)
