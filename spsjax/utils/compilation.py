"""Jitted functions, with their compile time apart from their run time."""

import threading
import time
from collections.abc import Callable

import jax
from jax import monitoring

from spsjax.utils import traced

_jitted = {}
_newest = threading.local()  # `ended`: when this thread compiled last


def _note_compilation(event: str, seconds: float, **_) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _newest.ended = time.perf_counter()


monitoring.register_event_duration_secs_listener(_note_compilation)


def compiled(function: Callable, *static, donate: int | None = None) -> Callable:
    """Returns `function(*static, ...)` as a jitted function of the remaining arguments.

    The jitted function returns `(result, compile_seconds)`. The second is 0 if a program for these
    shapes and shardings was there already, also of other numbers (`traced.number`) in `static`.

    Args:
        function: pure function.
        static: hashable leading arguments, compiled in but for their numbers.
        donate: index of a remaining argument whose buffers the result may take over.
    """
    program, numbers = jitted(function, *static, donate=donate)

    def call(*args):
        start = time.perf_counter()
        result = program(numbers, *args)  # returns as soon as it is compiled and has begun
        return result, max(getattr(_newest, "ended", start) - start, 0.0)

    return call


def jitted(
    function: Callable, *static, donate: int | None = None
) -> tuple[jax.stages.Wrapped, tuple[float, ...]]:
    """Returns the function that `compiled` calls, and its first argument: the numbers of `static`.

    Takes what `compiled` takes.
    """
    static, numbers = traced.split(static)
    key = function, static, donate
    if key not in _jitted:

        def run(numbers, *args):
            return function(*traced.join(static, numbers), *args)

        run.__name__ = run.__qualname__ = function.__name__  # in programs and in profiles
        _jitted[key] = jax.jit(run, donate_argnums=() if donate is None else donate + 1)
    return _jitted[key], numbers


def clear() -> None:
    """Forgets all programs: one process may not map the programs of a whole test suite."""
    _jitted.clear()
    jax.clear_caches()
