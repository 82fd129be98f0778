"""Traced numbers in static objects, so that a new value does not compile a new program.

Drafters, stopping rules, verifiers and schedules are frozen dataclasses, and static arguments of
jitted functions. Fields declared with `number` are traced instead. `split` takes their values out
of the static arguments, the jitted function receives them as an argument of its own, and `join`
puts them back while the function is traced. So code may compute with such a field, but may not
branch on it in Python.

A Python float stays weakly typed as an argument of a jitted function: in an expression with arrays
it has their precision, as a constant would. An expression of such numbers alone, as 1 - memory, has
the precision of a JAX scalar: float32, unless 64 bits are enabled.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable

import numpy as np

from spsjax.utils import fields

_OFF = "number whose value stays static"  # key in a field's metadata


class _Absent(enum.Enum):
    """Placeholder of a traced number in a static object."""

    NUMBER = enum.auto()


def number(default=dataclasses.MISSING, off: float | None = None, of=dataclasses.field, **options):
    """Returns a dataclass field with a traced value: an int if it is annotated `int`, else a float.

    Args:
        default: default of the field; missing: it has none.
        off: value that stays static, because it removes code from the compiled program.
        of: function that makes the field, such as one of `utils.fields`, which checks its value.
        options: further arguments of that function.
    """
    return of(default=default, metadata={_OFF: off}, **options)


share = functools.partial(number, of=fields.number, most=1)  # field with a traced value in [0, 1]


@functools.lru_cache(maxsize=1024)  # called in every step of an engine; 40 times faster
def split(static: tuple) -> tuple[tuple, tuple[float, ...]]:
    """Returns static arguments without their traced numbers, and these numbers.

    Arguments that differ only in these numbers become equal. The function descends into tuples and
    into frozen dataclasses that are compared by their fields.
    """
    numbers = []

    def take(field: dataclasses.Field, value):
        if not isinstance(value, (int, float, np.number)) or value == field.metadata[_OFF]:
            return value
        numbers.append(int(value) if field.type is int else float(value))
        return _Absent.NUMBER

    return _mapped(take, static), tuple(numbers)


def join(static: tuple, numbers: tuple) -> tuple:
    """Inverts `split` with other numbers, which may be traced; objects do not check their fields.

    Attributes that are not fields are lost.
    """
    remaining = iter(numbers)
    return _mapped(lambda _, value: next(remaining) if value is _Absent.NUMBER else value, static)


def _mapped(function: Callable, value):
    """Returns a value with `function(field, number)` in place of each number.

    If no number changes, it returns the same object.
    """
    if type(value) is tuple:
        items = tuple(_mapped(function, item) for item in value)
        return items if any(new is not old for new, old in zip(items, value)) else value
    options = getattr(type(value), "__dataclass_params__", None)
    if options is None or not (options.frozen and options.eq):
        return value
    fields, same = {}, True
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = function(field, old) if _OFF in field.metadata else _mapped(function, old)
        fields[field.name], same = new, same and new is old
    if same:
        return value
    copy = object.__new__(type(value))  # skips `__post_init__`, which cannot check traced numbers
    for name, new in fields.items():
        object.__setattr__(copy, name, new)
    return copy
