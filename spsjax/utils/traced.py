"""Numbers of static objects that are traced, so that a new value compiles nothing.

Drafters, their rules, verifiers and pacers are frozen dataclasses, and static arguments of jitted
functions. A field declared with `number` is not: `split` takes its value out of the static
arguments, the jitted function takes it as an argument of its own, and `join` puts it back while the
function is traced. So traced code may compute with the field, but may not branch on it in Python.

A Python float stays weakly typed as an argument of a jitted function. In an expression with arrays
it has their precision, as if it were a constant. Only what is computed from numbers alone, as
1 - memory, has that of a JAX scalar: float32, unless 64 bits are enabled.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable

import numpy as np

_OFF = "number whose value stays static"  # of a field's metadata


class _Absent(enum.Enum):
    """The value of a traced number in a static object."""

    NUMBER = enum.auto()


def number(default: object = dataclasses.MISSING, off: float | None = None):
    """Returns a dataclass field whose value is traced, an int if it is annotated so, or a float.

    Args:
        default: default of the field; missing: it has none.
        off: value that stays static, because it switches something off in the compiled program.
    """
    return dataclasses.field(default=default, metadata={_OFF: off})


@functools.lru_cache(maxsize=1024)  # an engine asks in every step, and a hash is 40 times faster
def split(static: tuple) -> tuple[tuple, tuple[float, ...]]:
    """Returns static arguments without their traced numbers, and these numbers.

    Arguments that differ in these numbers alone become equal. Looks into tuples and into frozen
    dataclasses that are compared by their fields.
    """
    numbers = []

    def take(field: dataclasses.Field, value):
        if not isinstance(value, (int, float, np.number)) or value == field.metadata[_OFF]:
            return value
        numbers.append(int(value) if field.type is int else float(value))
        return _Absent.NUMBER

    return _mapped(take, static), tuple(numbers)


def join(static: tuple, numbers: tuple) -> tuple:
    """Returns what was split, with these numbers, which may be traced; nothing is checked.

    What an object keeps beside its fields is lost.
    """
    left = iter(numbers)
    return _mapped(lambda _, value: next(left) if value is _Absent.NUMBER else value, static)


def _mapped(function: Callable, value):
    """Returns a value with `function(field, number)` for each number, or itself if none differs."""
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
    copy = object.__new__(type(value))  # runs no checks, which do not take traced numbers
    for name, new in fields.items():
        object.__setattr__(copy, name, new)
    return copy
