"""Whether kernels are used.

The environment variable `SPSJAX_KERNELS` says it: "off"; "on", for NVIDIA GPUs; or "interpret",
which interprets the kernels on any device, slowly, to test their results.
"""

import importlib
import os
from collections.abc import Callable
from types import ModuleType

import jax
from jax import lax

from spsjax.errors import InputError, one_line, short_repr
from spsjax.types import PyTree

VARIABLE = "SPSJAX_KERNELS"
MODES = "off", "on", "interpret"

# What is traced in `with KERNELS("on"):` overrides the variable. None: it does not.
KERNELS = jax.make_user_context(None)


def mode() -> str:
    """Returns "off", "on" or "interpret"; raises InputError if the variable has another value."""
    value = KERNELS.value or os.environ.get(VARIABLE) or "off"
    if value not in MODES:
        raise InputError(f"{VARIABLE}: expected {', '.join(MODES)}, found {short_repr(value)}")
    return value


def kernels_of(name: str) -> ModuleType | None:
    """Returns the module `spsjax.<name>` of kernels, or None if they are off.

    They are off on meshes of several devices, whose arrays they cannot read. The module is imported
    here only, because that takes a while.
    """
    if mode() == "off" or jax.sharding.get_abstract_mesh().size > 1:
        return None
    try:
        return importlib.import_module(f"spsjax.{name}")
    except ImportError as error:  # JAX says that it will remove Pallas for Triton
        raise InputError(
            f"{VARIABLE}: expected a JAX with Pallas for Triton, found {jax.__version__}: "
            f"{one_line(error)}"
        ) from None


def chosen(kernels: Callable, plain: Callable) -> Callable:
    """Returns the function of arrays that is used: `kernels` or `plain`.

    Gradients are those of `plain`.

    Args:
        kernels: function of the arrays and of `interpret`, whether kernels are interpreted.
        plain: function of the same arrays in plain XLA.
    """
    if mode() == "off":
        return plain

    @jax.custom_vjp
    def run(*arrays: PyTree) -> PyTree:
        if mode() == "interpret":
            return kernels(*arrays, interpret=True)
        return lax.platform_dependent(*arrays, cuda=kernels, default=plain)

    def forward(*arrays):
        return plain(*arrays), arrays

    def backward(arrays, gradient):
        return jax.vjp(plain, *arrays)[1](gradient)

    run.defvjp(forward, backward)
    return run
