"""Jitted functions with a measurement of their compile time."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import monitoring

from spsjax.types import PyTree
from spsjax.utils import compile_line, program_cache, traced

Options = tuple[tuple[str, int | str], ...]  # options of XLA, by name

# On CPUs, programs compile faster with both, and rounds take as long: measured with a model of
# 135M parameters on a processor without products in bfloat16 (two cores of an AMD EPYC, Zen 3). The
# preset fuses less. In float32, rounds would take up to a tenth longer.
_LEVEL = "xla_backend_optimization_level", 1
_PRESET = "xla_cpu_opt_preset", "CPU_OPT_PRESET_FAST_COMPILE"

_jitted: dict[tuple, jax.stages.Wrapped] = {}


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
    shown: Any = None

    def end_line(self) -> None:
        """Ends its line on the terminal, if it has one."""
        if self.shown is not None:
            compile_line.end(self.shown)
            self.shown = None


_newest = _Newest()


def _note_compilation(event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _newest.ended = time.perf_counter()
        if not _newest.traces:
            _newest.end_line()


monitoring.register_event_duration_secs_listener(_note_compilation)


def fast_options(params: PyTree, mesh: jax.sharding.Mesh | None = None) -> Options:
    """Returns options with which programs on these parameters compile faster, and run as fast.

    There are none on other devices than CPUs, or if XLA_FLAGS names either option or a file.

    Args:
        params: parameters of the model that takes most of the time.
        mesh: mesh of the devices; None: JAX's default device.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    given = os.environ.get("XLA_FLAGS", "").strip()
    is_file = given and not given.startswith("-")
    if platform != "cpu" or is_file or _LEVEL[0] in given or _PRESET[0] in given:
        return ()
    leaves = jax.tree.leaves(params)
    narrow = sum(leaf.size for leaf in leaves if leaf.dtype == jnp.bfloat16)
    mostly_narrow = 2 * narrow > sum(leaf.size for leaf in leaves)
    return (_LEVEL, _PRESET) if mostly_narrow else (_LEVEL,)


def compiled(
    function: Callable, *static, donate: int | None = None, options: Options = ()
) -> Callable:
    """Returns `function(*static, ...)` as a jitted function of the remaining arguments.

    The jitted function returns `(result, compile_seconds)`. The second is 0 if a program for these
    shapes and shardings exists. Values of traced numbers in `static` (`traced.number`) do not
    matter.

    Args:
        function: pure function.
        static: hashable leading arguments, which are compiled in, except for traced numbers.
        donate: index of a remaining argument whose buffers the result may reuse.
        options: options of XLA; with them, what is returned cannot be called inside of a jit.
    """
    program, numbers = jitted(function, *static, donate=donate, options=options)

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
    function: Callable, *static, donate: int | None = None, options: Options = ()
) -> tuple[jax.stages.Wrapped, tuple[float, ...]]:
    """Returns the function that `compiled` calls and its first argument, the numbers of `static`.

    The arguments are those of `compiled`.
    """
    program_cache.use()
    static, numbers = traced.split(static)
    key = function, static, donate, options
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
        donated = () if donate is None else donate + 1
        _jitted[key] = jax.jit(run, donate_argnums=donated, compiler_options=dict(options))
    return _jitted[key], numbers


def clear() -> None:
    """Discards all compiled programs, for tests: the OS limits a process's memory mappings."""
    _jitted.clear()
    jax.clear_caches()
