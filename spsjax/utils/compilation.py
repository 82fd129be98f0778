"""Jitted functions with a measurement of their compile time."""

import threading
import time
from collections.abc import Callable

import jax
from jax import monitoring

from spsjax.utils import compile_line, program_cache, traced

_jitted = {}


class _Newest(threading.local):
    """Newest compilation of a thread.

    Attributes:
        ended: time of its end.
        calls: whether the thread is in a call of a jitted function, which compiles what it traces.
        traces: whether the thread traces a program now; what JAX compiles meanwhile are constants.
        shown: what `compile_line.end` needs while it runs.
    """

    ended = float("-inf")
    calls = traces = False
    shown = None

    def end_line(self) -> None:
        """Ends its line on the terminal, if it has one."""
        if self.shown is not None:
            compile_line.end(self.shown)
            self.shown = None


_newest = _Newest()


def _note_compilation(event: str, seconds: float, **_) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _newest.ended = time.perf_counter()
        if not _newest.traces:
            _newest.end_line()


monitoring.register_event_duration_secs_listener(_note_compilation)


def compiled(function: Callable, *static, donate: int | None = None) -> Callable:
    """Returns `function(*static, ...)` as a jitted function of the remaining arguments.

    The jitted function returns `(result, compile_seconds)`. The second is 0 if a program for these
    shapes and shardings exists. Values of traced numbers in `static` (`traced.number`) do not
    matter.

    Args:
        function: pure function.
        static: hashable leading arguments, which are compiled in, except for traced numbers.
        donate: index of a remaining argument whose buffers the result may reuse.
    """
    program, numbers = jitted(function, *static, donate=donate)

    def call(*args):
        start, _newest.calls = time.perf_counter(), True
        try:
            result = program(numbers, *args)  # returns after compilation, before the program ends
        finally:
            _newest.calls = False
            _newest.end_line()  # it has not ended if tracing or compilation failed
        return result, max(_newest.ended - start, 0.0)

    return call


def jitted(
    function: Callable, *static, donate: int | None = None
) -> tuple[jax.stages.Wrapped, tuple[float, ...]]:
    """Returns the function that `compiled` calls and its first argument, the numbers of `static`.

    The arguments are those of `compiled`.
    """
    program_cache.use()
    static, numbers = traced.split(static)
    key = function, static, donate
    if key not in _jitted:

        def run(numbers, *args):
            if not _newest.calls or _newest.traces:
                return function(*traced.join(static, numbers), *args)
            _newest.end_line()
            _newest.shown, _newest.traces = compile_line.begin(function.__name__), True
            try:
                return function(*traced.join(static, numbers), *args)
            finally:
                _newest.traces = False

        run.__name__ = run.__qualname__ = function.__name__  # the name in profiles
        _jitted[key] = jax.jit(run, donate_argnums=() if donate is None else donate + 1)
    return _jitted[key], numbers


def clear() -> None:
    """Discards all compiled programs, for tests: the OS limits a process's memory mappings."""
    _jitted.clear()
    jax.clear_caches()
