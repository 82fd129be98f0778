"""Jitted functions, with their compile time apart from their run time."""

import functools
import threading
import time
from collections.abc import Callable

import jax
from jax import monitoring

_jitted = {}
_newest = threading.local()  # `ended`: when this thread compiled last


def _note_compilation(event: str, seconds: float, **_) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _newest.ended = time.perf_counter()


monitoring.register_event_duration_secs_listener(_note_compilation)


def compiled(function: Callable, *static, donate: int | None = None) -> Callable:
    """Returns `function(*static, ...)` as a jitted function of the remaining arguments.

    The jitted function returns `(result, compile_seconds)`. The second is 0 if a program for these
    shapes and shardings was there already.

    Args:
        function: pure function.
        static: hashable leading arguments, compiled in.
        donate: index of a remaining argument whose buffers the result may take over.
    """
    key = function, static, donate
    if key not in _jitted:
        donated = () if donate is None else donate
        _jitted[key] = jax.jit(functools.partial(function, *static), donate_argnums=donated)
    jitted = _jitted[key]

    def call(*args):
        start = time.perf_counter()
        result = jitted(*args)  # returns as soon as its program is compiled and has begun
        return result, max(getattr(_newest, "ended", start) - start, 0.0)

    return call


def clear() -> None:
    """Forgets all programs: one process may not map the programs of a whole test suite."""
    _jitted.clear()
    jax.clear_caches()
