# ruff: noqa: E402 (the environment is set before JAX is imported)
"""Environment of the tests, set before JAX starts: eight CPU devices and a compilation cache.

`conftest` imports this module first. Device count and platform can be chosen only before JAX asks
for devices.
"""

import importlib.metadata
import os
import pathlib

ROOT = pathlib.Path(__file__).parent.parent.parent
# Most of the time goes to compiling programs that run for milliseconds. So machine code is not
# optimized, and fusions take an older path that compiles twice as fast. Code that runs for long is
# compiled with `FAST`. `.ci/run` compiles its tests on Python 3.13 at the level that users have.
_FLAGS = {
    "xla_force_host_platform_device_count": 8,
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
FAST = {"xla_backend_optimization_level": 3}  # compiler options of `jax.jit`
OFTEN = {"xla_backend_optimization_level": 1}  # of small programs that run often
if importlib.metadata.version("jaxlib") < "0.11":  # later versions have no such flag
    _FLAGS["xla_cpu_use_fusion_emitters"] = "false"
    FAST["xla_cpu_use_fusion_emitters"] = True
for _flag, _value in _FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_flag}={_value}".strip()
# On one GPU: SPSJAX_TEST_PLATFORM=cuda python -m pytest -k "not eight and not mesh" ...
os.environ["JAX_PLATFORMS"] = os.environ.get("SPSJAX_TEST_PLATFORM", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
# Tests compile many small programs, all below the default thresholds of the cache.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax

# The CPU's compiler has read its flags once there are devices. The TPU compiler reads the same
# variable when it is loaded, and ends the process at a flag that it does not know. Child processes
# that do not load it get `CHILD_FLAGS`.
jax.devices()
CHILD_FLAGS = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = CHILD_FLAGS.replace("--xla_cpu_use_fusion_emitters=false", "")
