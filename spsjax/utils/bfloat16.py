"""Whether the default device multiplies bfloat16 as it is."""

import functools
import re

import jax
import jax.numpy as jnp


@functools.cache
def is_multiplied_directly() -> bool:
    """Returns whether XLA multiplies matrices of bfloat16 without converting them to float32 first.

    Accelerators do. On CPUs it depends on the version of XLA and on the processor, so a small
    product is compiled, and the program read.
    """
    if jax.default_backend() != "cpu":
        return True
    rows, weights = (jax.ShapeDtypeStruct((size, 128), jnp.bfloat16) for size in (2, 128))
    program = jax.jit(jnp.dot).lower(rows, weights).compile().as_text()
    return re.search(r" = bf16\[2,128\]\S* dot\(", program) is not None
