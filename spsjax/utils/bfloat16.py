"""Test for native bfloat16 products on the default device."""

import functools
import re

import jax
import jax.numpy as jnp


@functools.cache
def is_multiplied_directly() -> bool:
    """Returns whether XLA multiplies bfloat16 matrices without a conversion to float32.

    It does on accelerators. On CPUs this depends on the version of XLA and on the processor, so the
    function compiles a small product and inspects the program.
    """
    if jax.default_backend() != "cpu":
        return True
    rows, weights = (jax.ShapeDtypeStruct((size, 128), jnp.bfloat16) for size in (2, 128))
    program = jax.jit(jnp.dot).lower(rows, weights).compile().as_text()
    return re.search(r" = bf16\[2,128\]\S* dot\(", program or "") is not None
