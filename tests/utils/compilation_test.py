"""Options with which programs compile fast."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spsjax
from spsjax.utils import compilation

WIDE = {"kernel": jnp.ones((4, 4), jnp.float32)}
NARROW = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), WIDE)


def test_fast_options_are_for_cpus_and_yield_to_xla_flags(monkeypatch):
    assert compilation.fast_options(NARROW) == ()  # XLA_FLAGS of the tests has the level
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    level, preset = compilation.fast_options(NARROW)
    assert compilation.fast_options(WIDE) == (level,)
    for given in (f"--{preset[0]}=FAST_RUNTIME", "flags.txt"):
        monkeypatch.setenv("XLA_FLAGS", given)
        assert compilation.fast_options(NARROW) == ()
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert compilation.fast_options(NARROW) == ()


def test_options_of_a_program_reach_xla():
    program = compilation.compiled(jnp.negative, options=(("xla_no_such_option", 1),))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        program(NARROW["kernel"])


@pytest.mark.slow
def test_texts_of_programs_with_fast_options_do_not_depend_on_the_batch(monkeypatch, target, draft):
    """XLA knows both options, and rows that are alone get what they get together."""
    given, jit = [], jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda *args, **options: given.append(options) or jit(*args, **options)
    )
    monkeypatch.delenv("XLA_FLAGS")
    compilation.clear()

    def narrow(model):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
        return dataclasses.replace(model, params=params)

    models, prompts = (narrow(target), narrow(draft)), ([3, 4, 5], [9], [1, 2])
    together = spsjax.generate(models[0], prompts, models[1], 3, max_new_tokens=12)
    options = compilation.fast_options(models[0].params)
    assert len(options) == 2 and {"compiler_options": dict(options)}.items() <= given[-1].items()
    alone = spsjax.generate(models[0], prompts[:1], models[1], 3, max_new_tokens=12)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[0])
    compilation.clear()
