"""Multi-process runs: start-up, communication and locks."""

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

# Seconds without a heartbeat after which a process counts as lost, and the other processes end.
HEARTBEAT_SECONDS = 20

# Folders that this process has locked, with their locks.
_LOCKED: dict[pathlib.Path, contextlib.AbstractContextManager] = {}

# host:port, with an IPv6 address in brackets and a port in [1, 65535].
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
    """Connects the processes of a run. Call it before any other use of JAX.

    On TPU pods and under schedulers that JAX supports, no argument is needed.

    Args:
        coordinator: address and port of process 0, equal in all processes.
        num_processes: number of processes.
        process_id: index of this process, from 0.
        timeout: seconds to wait for the other processes.
        saves: whether the program saves its state when it receives SIGTERM. If so, the signal does
            not end a process, and all processes are notified of it
            (`multihost_utils.reached_preemption_sync_point`).

    Raises:
        InputError: the processes could not connect to each other.
    """
    if coordinator is not None and not _ADDRESS.fullmatch(coordinator):
        raise InputError(
            f"coordinator: expected host:port, as 10.0.0.1:8476, found {short_repr(coordinator)}"
        )
    jax.config.update("jax_enable_preemption_service", saves)
    # The transport of collectives between CPU processes.
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
    """Raises InputError unless all processes call this function with the same values.

    Processes that run different programs would wait for each other forever.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(repr(values).encode()).digest()[:8]
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint32))
    if len(np.unique(digests.reshape(jax.process_count(), -1), axis=0)) > 1:
        raise InputError(
            "processes: expected the same call in all processes, found different arguments. "
            "Start every process with the same command."
        )


def is_main_process() -> bool:
    """Returns whether this is process 0, the only one that prints and writes files."""
    return jax.process_index() == 0


def all_true(value: bool) -> bool:
    """Returns whether `value` is true in all processes. Every process must call it."""
    if jax.process_count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.asarray(value))))


def broadcast_int(number: int) -> int:
    """Returns the number that process 0 passed. Every process must call it."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.asarray(number)).ravel()[0])


def broadcast_text(text: str) -> str:
    """Returns the text that process 0 passed. Every process must call it."""
    if jax.process_count() == 1:
        return text
    encoded = np.frombuffer(text.encode(), np.uint8)
    length = broadcast_int(len(encoded))
    padded = np.resize(encoded, length) if is_main_process() else np.zeros(length, np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(padded)).decode()


def barrier(name: str) -> None:
    """Waits until all processes have reached the barrier of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def settle(*results: PyTree) -> None:
    """Waits until the programs of these results have ended, if there are several processes.

    Independent programs may run in different orders in different processes. Then a collective of
    one program would be matched with a collective of another.
    """
    if jax.process_count() > 1:
        jax.block_until_ready(results)


def to_host(tree: PyTree) -> PyTree:
    """Returns complete NumPy copies of all arrays in every process."""
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
            f"{path}: expected a folder that no other run uses, found one in use by another "
            "process. Wait for it to finish or choose another --workdir."
        ) from None
    except OSError as error:
        raise InputError(f"{path}: expected a folder for a run, found {one_line(error)}") from None
    _LOCKED[path] = lock
