"""The persistent cache of compiled programs: what turns it on, and what may be wrong with it."""

import os
import pathlib
import subprocess
import sys
import warnings

import filelock
import jax
import pytest
from helpers.environment import CHILD_FLAGS, ROOT

from spsjax.utils import program_cache

DIRECTORY, LIMIT = "jax_compilation_cache_dir", "jax_compilation_cache_max_size"
OPTIONS = DIRECTORY, LIMIT, "jax_persistent_cache_min_compile_time_secs"

# Compiles a program that takes longer than the shortest one that is kept, and runs it.
PROGRAM = """
import jax, jax.numpy as jnp
from spsjax.utils.compilation import compiled

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))

def chain(x):
    for _ in range(60):
        x = jnp.sort(jnp.sin(x) @ jnp.cos(x))
    return x

start = jnp.eye(16)
hits.clear()
result, seconds = compiled(chain)(start)
count = hits.count("/jax/compilation_cache/cache_hits")
print(float(result.sum()), count)
"""


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """JAX's options and the environment of a process that has set no cache; restored afterwards."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    for name in OPTIONS:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(program_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program_cache, "_is_decided", False)
    for name, value in zip(OPTIONS, (None, -1, 1.0)):
        jax.config.update(name, value)
    with warnings.catch_warnings():
        yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def folder() -> str | None:
    """Returns the folder of JAX's cache after the package has decided."""
    program_cache.use()
    return getattr(jax.config, DIRECTORY)


def test_use_takes_bounded_folder_per_processor(unset):
    chosen = pathlib.Path(folder())
    assert chosen.parent == unset / "spsjax" / "programs" and chosen.stat().st_mode & 0o77 == 0
    assert getattr(jax.config, LIMIT) == 4 * 2**30
    assert program_cache._processor() == chosen.name


@pytest.mark.parametrize("own", ["relative", ""])
def test_use_without_absolute_cache_home_takes_home(unset, monkeypatch, own):
    monkeypatch.setenv("XDG_CACHE_HOME", own)
    monkeypatch.setenv("HOME", str(unset))
    assert folder().startswith(str(unset / ".cache" / "spsjax" / "programs"))


def test_use_with_variable_moves_cache(unset, monkeypatch):
    monkeypatch.setenv(program_cache.VARIABLE, str(unset / "other"))
    assert pathlib.Path(folder()).parent == unset / "other"


def test_use_with_off_has_no_cache(unset, monkeypatch):
    monkeypatch.setenv(program_cache.VARIABLE, "OFF")
    assert folder() is None and getattr(jax.config, LIMIT) == -1 and not os.listdir(unset)


@pytest.mark.parametrize("value", ["", "/own"])
def test_use_keeps_cache_of_jax_variable(unset, monkeypatch, value):
    monkeypatch.setenv(DIRECTORY.upper(), value)
    assert folder() is None and getattr(jax.config, LIMIT) == -1


def test_use_keeps_cache_and_options_of_jax_config(unset):
    jax.config.update(DIRECTORY, "/own")
    assert folder() == "/own" and getattr(jax.config, LIMIT) == -1


def test_use_keeps_bound_of_jax_config(unset):
    jax.config.update(LIMIT, 1000)
    assert folder() and getattr(jax.config, LIMIT) == 1000


def test_use_with_other_processes_needs_named_folder(unset, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert folder() is None
    monkeypatch.setenv(program_cache.VARIABLE, str(unset))
    monkeypatch.setattr(program_cache, "_is_decided", False)
    assert folder() is not None


def no_home(unset, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", home)


def read_only(unset, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # the mode does not bind a superuser


def no_folder(unset, monkeypatch):
    (unset / "spsjax").write_text("a file")


def full_disk(unset, monkeypatch):
    monkeypatch.setattr(program_cache, "_LEAST_FREE", 2**80)


def locked(unset, monkeypatch):
    def acquire(self, *_, **__):
        raise filelock.Timeout(self.lock_file)

    monkeypatch.setattr(filelock.FileLock, "__enter__", acquire)


@pytest.mark.parametrize("fault", [no_home, read_only, no_folder, full_disk, locked])
def test_use_without_usable_folder_warns_once(unset, monkeypatch, fault):
    fault(unset, monkeypatch)
    with pytest.warns(UserWarning, match="compiled programs are not kept") as caught:
        assert folder() is None and folder() is None
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert getattr(jax.config, LIMIT) == -1


def test_use_removes_torn_and_oldest_programs(unset, monkeypatch):
    monkeypatch.setattr(program_cache, "_MOST_PROGRAMS", 2)
    chosen = unset / "spsjax" / "programs" / program_cache._processor()
    chosen.mkdir(parents=True)
    for name, when in (("jit_a-1", 9), ("jit_b-2", 7), ("jit_c-3", 8), ("jit_d-4", None)):
        (chosen / f"{name}-cache").write_bytes(b"program")
        if when is not None:
            (chosen / f"{name}-atime").write_bytes(b"8 bytes.")
            os.utime(chosen / f"{name}-atime", (when, when))
    (chosen / "xla_gpu_per_fusion_autotune_cache_dir").mkdir()
    folder()
    left = {path.name for path in chosen.iterdir()} - {".lockfile"}
    assert left == {
        *("jit_a-1-cache", "jit_a-1-atime", "jit_c-3-cache", "jit_c-3-atime"),
        "xla_gpu_per_fusion_autotune_cache_dir",
    }


def start(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    flags = CHILD_FLAGS.replace("device_count=8", "device_count=1")
    extra = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, program_cache.VARIABLE: str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=kept | extra, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process) -> tuple[str, int]:
    """Returns the sum that a process printed, and the number of programs that it read."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and "compiled programs" not in errors, errors
    total, hits = output.split()
    return total, int(hits)


@pytest.mark.process
def test_processes_share_programs_and_replace_torn_ones(tmp_path):
    """Two processes at once fill one folder, a third reads it, a fourth repairs a torn program."""
    (total, _), other = map(finish, [start(tmp_path), start(tmp_path)])
    assert other[0] == total
    assert finish(start(tmp_path)) == (total, 1)
    (program,) = tmp_path.glob("*/jit_chain-*-cache")
    whole = program.stat().st_size
    program.write_bytes(program.read_bytes()[:1000])
    program.with_name(program.name.replace("-cache", "-atime")).unlink()
    assert finish(start(tmp_path)) == (total, 0)
    assert program.stat().st_size > whole / 2 and finish(start(tmp_path)) == (total, 1)
