"""Options with which programs compile fast."""

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.utils import compilation

WIDE = {"kernel": jnp.ones((4, 4), jnp.float32)}
NARROW = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), WIDE)


def test_fast_options_are_for_cpus_and_yield_to_xla_flags(monkeypatch):
    assert compilation.fast_options(NARROW) == ()  # XLA_FLAGS of the tests has the level
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    level, preset = compilation.fast_options(NARROW)
    assert compilation.fast_options(WIDE) == (level,)
    monkeypatch.setenv("XLA_FLAGS", f"--{preset[0]}=FAST_RUNTIME")
    assert compilation.fast_options(NARROW) == ()
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert compilation.fast_options(NARROW) == ()


def test_program_with_fast_options_computes_the_same(monkeypatch):
    """XLA knows the options by their names; other options are another program."""
    monkeypatch.delenv("XLA_FLAGS")
    options = compilation.fast_options(NARROW)

    def product(x):
        return x @ x

    fast, seconds = compilation.compiled(product, options=options)(NARROW["kernel"])
    plain, _ = compilation.compiled(product)(NARROW["kernel"])
    assert seconds > 0 and compilation.compiled(product)(NARROW["kernel"])[1] == 0
    assert compilation.jitted(product)[0] is not compilation.jitted(product, options=options)[0]
    np.testing.assert_array_equal(np.asarray(fast), np.asarray(plain))
