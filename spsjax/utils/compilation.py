"""Compiled programs, with their compile time apart from their run time."""

import functools
import time
from collections.abc import Callable

import jax

_programs = {}


def compiled(function: Callable, *static, donate: int | None = None) -> Callable:
    """Returns `function(*static, ...)` as a jitted function of the remaining arguments.

    The jitted function returns `(result, compile_seconds)`. The second is 0 if a program for these
    shapes and shardings was there already.

    Args:
        function: pure function.
        static: hashable leading arguments, compiled in.
        donate: index of a remaining argument whose buffers the result may take over.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        key = (function, static, donate, mesh, structure, *map(_signature, leaves))
        seconds = 0.0
        if key not in _programs:
            start = time.perf_counter()
            donated = () if donate is None else donate
            jitted = jax.jit(functools.partial(function, *static), donate_argnums=donated)
            _programs[key] = jitted.lower(*args).compile()
            seconds = time.perf_counter() - start
        return _programs[key](*args), seconds

    return call


def clear() -> None:
    """Forgets all programs: one process may not map the programs of a whole test suite."""
    _programs.clear()


def _signature(leaf: jax.Array):
    return leaf.shape, leaf.dtype, leaf.sharding
