# ruff: noqa: E402 (the environment is set before JAX is imported)
"""Test environment: eight CPU devices, a compilation cache, and tiny models.

It runs before any test module is imported, hence before JAX starts. Device count and platform can
be chosen only then. The next token of every tiny model depends on the whole context.
"""

import functools
import gc
import importlib.metadata
import os
import pathlib
import shutil

_ROOT = pathlib.Path(__file__).parent.parent
# Most of the time goes to compiling programs that run for milliseconds. So machine code is not
# optimized, and fusions take an older path that compiles twice as fast. Code that runs for long is
# compiled with `FAST`, as users have it. `.ci/run` runs the core tests that way on Python 3.13.
_FLAGS = {
    "xla_force_host_platform_device_count": 8,
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
FAST = {"xla_backend_optimization_level": 3}  # compiler options of `jax.jit`
if importlib.metadata.version("jaxlib") < "0.11":  # later versions have no such flag
    _FLAGS["xla_cpu_use_fusion_emitters"] = "false"
    FAST["xla_cpu_use_fusion_emitters"] = True
for _flag, _value in _FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_flag}={_value}".strip()
# On one GPU: SPSJAX_TEST_PLATFORM=cuda python -m pytest -k "not eight and not mesh" ...
os.environ["JAX_PLATFORMS"] = os.environ.get("SPSJAX_TEST_PLATFORM", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".jax_cache"))
# Tests compile many small programs, all below the default thresholds of the cache.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax import decode, execution, loading, tokenization
from spsjax.models import transformer
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding
from spsjax.performance import aot
from spsjax.utils import compilation

# The CPU's compiler has read its flags once there are devices. The TPU compiler reads the same
# variable when it is loaded, and ends the process at a flag that it does not know. Child processes
# that do not load it get `CHILD_FLAGS`.
jax.devices()
CHILD_FLAGS = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = CHILD_FLAGS.replace("--xla_cpu_use_fusion_emitters=false", "")

# Tracing and compiling make Python look for garbage often, which takes up to a fifth of their time.
# It is collected once per module instead.
gc.disable()

execution._SECONDS, execution._LEAST_SWEEPS = 0.0, 1  # costs need not be exact here

# Tests and a notebook plan for the same slice: it is compiled once.
aot.compile_pair = functools.cache(aot.compile_pair)


def tiny_config(vocab_size: int, **changes) -> transformer.Config:
    """Returns a config of one layer, in which a mesh can split every axis by eight."""
    fields = {
        "vocab_size": vocab_size,
        "d_model": 32,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_positions": 512,
        "tie_embeddings": False,
    }
    return transformer.Config(**fields | changes)


def spread_params(config: transformer.Config, seed: int, sharpness: float = 2.0):
    """Returns random parameters with logits of standard deviation `sharpness`.

    The weights of `transformer.init` are too small: every context would get nearly the same, flat
    distribution.
    """
    params = transformer.init(config, jax.random.key(seed))

    def grow(path, leaf):
        names = [entry.key for entry in path]
        if leaf.ndim < 2:
            return leaf
        if names[0] == "embed":
            return leaf / 0.02
        gain = sharpness if names[0] == "head" else 2.0
        return leaf / 0.02 * gain / leaf.shape[0] ** 0.5

    return jax.tree_util.tree_map_with_path(grow, params)


def spread_model(vocab_size: int, seed: int = 0, mesh=None, sharpness: float = 2.0, **changes):
    """Returns a model of random weights whose logits are spread and depend on the whole context."""
    config = tiny_config(vocab_size, **changes)
    return build_model(config, spread_params(config, seed, sharpness), mesh)


def nearby_model(model: loading.Model, seed: int = 1, distance: float = 0.2, mesh=None):
    """Returns a model near another, whose drafts are sometimes accepted and sometimes rejected."""
    leaves, structure = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    leaves = [
        leaf + distance * jnp.std(leaf) * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys)
    ]
    return build_model(model.config, jax.tree.unflatten(structure, leaves), mesh)


def build_model(config: transformer.Config, params, mesh) -> loading.Model:
    """Returns a model of these parameters, sharded over the mesh if there is one."""
    params = sharding.place_params(params, sharding.param_shardings(mesh, config))
    return loading.Model("tiny", config, params, mesh=mesh)


def logits_of(model: loading.Model):
    """Returns the model in the oracle's form: tokens -> float64 logits [V], without a cache."""
    config, width = model.config, 64

    @jax.jit
    def logits(tokens, length):
        output = transformer.apply(config, model.params, tokens[None])
        return output.logits[0, length - 1]

    @functools.cache
    def cached(tokens):
        padded = np.zeros(width, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(logits(padded, len(tokens)), np.float64)

    return lambda tokens: cached(tuple(tokens))


# Files that take longest, which begin first so that no process waits for another at the end.
SLOWEST = [
    *("exactness", "drafter_contract", "train_head", "eagle", "aot", "distributed", "statistical"),
    *("tree_exactness", "verifiers", "notebooks", "scripts", "tree_scripts", "core", "families"),
    *("sharding", "tree_loop", "decode", "resume", "trainer", "golden", "paper"),
]


def pytest_collection_modifyitems(items):
    def rank(item):
        name = item.path.stem.removesuffix("_test")
        return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)

    items.sort(key=rank)


def _forget_programs():
    compilation.clear()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Frees the programs of a module: one process cannot map the programs of all modules."""
    yield
    _forget_programs()


@pytest.fixture(autouse=True)
def forget_too_many_programs():
    """Frees the programs of a module before there are so many that the compiler crashes.

    Linux allows a process 65,530 mappings of memory by default, and a program has dozens.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 45_000:
        _forget_programs()


@pytest.fixture
def exact_buffers(monkeypatch):
    """Buffers as long as needed, not of 32 slots or more: large batches run 7 times faster."""
    monkeypatch.setattr(decode, "num_slots", lambda length: length)


@pytest.fixture(scope="session")
def target() -> loading.Model:
    """A target of 48 tokens, one of which is an end-of-sequence id."""
    return spread_model(48, eos_ids=(7,))


@pytest.fixture(scope="session")
def draft(target) -> loading.Model:
    """A draft half of whose tokens the target accepts."""
    return nearby_model(target)


@pytest.fixture(scope="session")
def small_target() -> loading.Model:
    """A target of 4 tokens: few enough to compute its joint distribution."""
    return spread_model(4, sharpness=1.0)


@pytest.fixture(scope="session")
def small_draft(small_target) -> loading.Model:
    """A draft of 4 tokens that is often wrong."""
    return nearby_model(small_target, distance=0.4)


@pytest.fixture(scope="session")
def sound_model_folder(tmp_path_factory):
    """A folder with a model of 64 tokens and two layers."""
    folder = tmp_path_factory.mktemp("models") / "sound"
    config = tiny_config(64, num_layers=2)
    hf_weights.save(folder, config, spread_params(config, 0), "float32")
    return folder


@pytest.fixture
def model_folder(sound_model_folder, tmp_path):
    """A copy of the sound model folder, which a test may damage."""
    shutil.copytree(sound_model_folder, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory):
    """A tokenizer of 300 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return tokenization.train(["def f(x):\n    return x\n" * 9, "import os\n" * 9], path, 300)
