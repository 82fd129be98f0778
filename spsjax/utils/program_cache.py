"""JAX's persistent cache of compiled programs, which the package turns on.

JAX's key of a program holds its operations, jaxlib's version, the compiler's flags and the kind of
the devices. With jax 0.12 it holds a CPU's instruction sets, too, and earlier versions do not say.
So every model of a processor has a folder of its own.
"""

import hashlib
import os
import pathlib
import platform
import shutil
import threading
import warnings
from typing import Any

import filelock
import jax

from spsjax.errors import one_line
from spsjax.utils import user_cache

# Holds a folder, or "off". Without it: `spsjax/programs` in the user's cache folder.
VARIABLE = "SPSJAX_COMPILATION_CACHE"

_MAX_SIZE = "jax_compilation_cache_max_size"
# Options of JAX with JAX's default and ours.
_OPTIONS = {
    # Beyond it, the programs that were used least recently are deleted. The bound also makes JAX
    # lock the folder. Without a lock a process could read what another one has half written.
    _MAX_SIZE: (-1, 4 * 2**30),
    # A program is read in 0.02 s or more, and written in 0.1 ms per program that is there.
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.2),
}
_MOST_PROGRAMS = 1000  # at the start of a process: to write one more then takes 0.1 s
_LEAST_FREE = 2**28  # bytes on the disk; a write that fails leaves a part of a program behind
_LOCK_SECONDS = 10  # as long as JAX waits

# Lines of /proc/cpuinfo that say which machine code a processor runs, on x86 and on ARM.
_MODEL_FIELDS = {
    "vendor_id", "cpu family", "model", "model name", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
}  # fmt: skip

_turning_on = threading.Lock()
_is_decided = False


def use() -> None:
    """Turns the cache on, the first time it is called in a process.

    A cache that the user has set in JAX, by the environment or in `jax.config`, stays as it is.
    There is none if `SPSJAX_COMPILATION_CACHE` is "off". Processes that run together
    (`jax.distributed`) have none unless the variable names a folder, which all of them must share:
    JAX lets only the first of them write, and the others would compile what it reads.

    A folder that cannot be used gives a warning, and programs run without the cache. A program that
    cannot be read or written is compiled without a warning.
    """
    global _is_decided
    if _is_decided:
        return
    with _turning_on:
        if not _is_decided:
            _decide(os.environ.get(VARIABLE, ""))
            _is_decided = True


def _decide(setting: str) -> None:
    if setting.lower() == "off" or _is_decided_in_jax():
        return
    if not setting and jax.distributed.is_initialized():
        return
    folder, options = None, _options()
    try:
        folder = _base(setting) / _processor()
        folder.mkdir(0o700, parents=True, exist_ok=True)  # who writes to it runs code of his own
        _check(folder)
        if options.get(_MAX_SIZE, getattr(jax.config, _MAX_SIZE)) != -1:
            _tidy(folder)
    except (OSError, RuntimeError, NotImplementedError) as error:
        warnings.warn(
            f"compiled programs are not kept: {folder or 'home'}: expected a folder with room to "
            f"write to, found {one_line(error)}. Set {VARIABLE} to a folder, or to off",
            stacklevel=2,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in options.items():
        jax.config.update(name, value)
    # JAX compiles what it cannot read, goes on after what it cannot write, and warns every time.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")


def _is_decided_in_jax() -> bool:
    """Returns whether the user has set a cache in JAX, or no cache."""
    name = "jax_compilation_cache_dir"
    config: Any = jax.config  # some versions leave the options out of its type
    is_set = getattr(config, name) is not None or name.upper() in os.environ
    return is_set or not config.jax_enable_compilation_cache


def _options() -> dict[str, float]:
    """Returns our options of the cache, without those that the user has set in JAX."""
    return {
        name: value
        for name, (default, value) in _OPTIONS.items()
        if getattr(jax.config, name) == default and name.upper() not in os.environ
    }


def _base(setting: str) -> pathlib.Path:
    """Returns the folder of the caches of all processors; raises RuntimeError without a home."""
    if setting:
        return pathlib.Path(setting).expanduser().absolute()
    return user_cache.folder("programs")


def _processor() -> str:
    """Returns a name of this machine's processor: its architecture and a hash of its model."""
    described = []
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():  # the end of the first core; the others are its equals
                    break
                if line.partition(":")[0].strip() in _MODEL_FIELDS:
                    described.append(line)
    except OSError:  # not Linux
        described = [platform.processor()]
    digest = hashlib.sha256("".join(described).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


def _check(folder: pathlib.Path) -> None:
    """Raises OSError unless the folder can be written to and its disk has room."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise OSError("a folder without write permission")
    if shutil.disk_usage(folder).free < _LEAST_FREE:
        raise OSError("a full disk")


def _tidy(folder: pathlib.Path) -> None:
    """Removes programs that were not written to the end, and the oldest if there are very many.

    JAX would neither read a torn program nor write it again. It writes the time of the last use to
    a second file after the program, so that torn programs have no such file.
    """
    with filelock.FileLock(folder / ".lockfile", timeout=_LOCK_SECONDS):  # JAX's own lock
        used: dict[str, float] = {}  # by program, the time of its last use
        for entry in os.scandir(folder):
            name, _, kind = entry.name.rpartition("-")
            if kind == "atime":
                used[name] = entry.stat().st_mtime
            elif kind == "cache":
                used.setdefault(name, 0.0)
        oldest = sorted(used, key=lambda name: used[name])[: max(len(used) - _MOST_PROGRAMS, 0)]
        for name in {name for name, when in used.items() if not when}.union(oldest):
            for kind in ("cache", "atime"):
                (folder / f"{name}-{kind}").unlink(missing_ok=True)
