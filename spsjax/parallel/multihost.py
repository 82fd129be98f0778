"""Several processes, one mesh: how they find each other, and what the first alone does."""

import contextlib
import hashlib
import pathlib
import re

import jax
import numpy as np
from jax.experimental import multihost_utils

from spsjax.errors import InputError, one_line, short_repr
from spsjax.types import PyTree
from spsjax.utils import atomic_files

# A process that is gone is missed after so many seconds, and the others end.
HEARTBEAT_SECONDS = 20

# Folders that this process has locked, with their locks.
_LOCKED: dict[pathlib.Path, contextlib.AbstractContextManager] = {}

_ADDRESS = re.compile(
    r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
)


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 300,
    saves: bool = False,
) -> None:
    """Joins the processes of a run; call it before any other use of JAX.

    On TPU pods, and under schedulers that JAX knows, no argument is needed.

    Args:
        coordinator: address and port at which process 0 listens, the same for all.
        num_processes: how many there are.
        process_id: which this is, from 0.
        timeout: seconds to wait for the others.
        saves: whether the program saves something when it is told to end (SIGTERM): all processes
            then hear of it (`multihost_utils.reached_preemption_sync_point`), and none ends by it.

    Raises:
        InputError: the processes did not find each other.
    """
    if coordinator is not None and not _ADDRESS.fullmatch(coordinator):
        raise InputError(
            f"coordinator: expected host:port, as 10.0.0.1:8476, found {short_repr(coordinator)}"
        )
    jax.config.update("jax_enable_preemption_service", saves)
    # What talks between processes where there is no accelerator.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"processes: expected {num_processes or 'all'} of them at "
            f"{coordinator or 'an address that JAX finds'}, found {one_line(error)}"
        ) from None


def check_same_everywhere(*values) -> None:
    """Raises InputError unless all processes call with the same values.

    Without it, each would go its own way, and wait for the others for ever.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(repr(values).encode()).digest()[:8]
    found = multihost_utils.process_allgather(np.frombuffer(digest, np.uint32))
    if len(np.unique(found.reshape(jax.process_count(), -1), axis=0)) > 1:
        raise InputError("processes: expected the same call in all of them, found different ones")


def is_main_process() -> bool:
    """Whether this process writes: text, reports and files are the first one's alone."""
    return jax.process_index() == 0


def all_true(fine: bool) -> bool:
    """Whether it is so in all processes, each of which has to ask."""
    if jax.process_count() == 1:
        return fine
    return bool(np.all(multihost_utils.process_allgather(np.asarray(fine))))


def broadcast_int(number: int) -> int:
    """The first process's number, in all of them."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.asarray(number)).ravel()[0])


def barrier(name: str) -> None:
    """Until all processes are here; `name` says where."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def to_host(tree: PyTree) -> PyTree:
    """The arrays as NumPy arrays, whole, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree, tiled=True))


def lock_folder(path: pathlib.Path) -> None:
    """Locks a run folder for the lifetime of this process, creating it if needed.

    The main process locks it for all processes of a run. Raises InputError if another run holds the
    lock, or if the folder cannot be made.
    """
    path = path.absolute()
    if not is_main_process() or path in _LOCKED:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = atomic_files.lock(path / ".lock", wait=False)
        lock.__enter__()  # released when the process ends
    except BlockingIOError:
        raise InputError(
            f"{path}: in use by another process. Wait for it to finish or choose another --workdir."
        ) from None
    except OSError as error:
        raise InputError(f"{path}: expected a folder for a run, found {one_line(error)}") from None
    _LOCKED[path] = lock
