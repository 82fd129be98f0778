"""Atomic file writes, checks of output names, file locks and file hashes."""

import contextlib
import errno
import glob
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator

import filelock

from spsjax.errors import InputError

# Error codes of file systems without locks, such as some network file systems.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


@contextlib.contextmanager
def atomic_write(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path that replaces the file at `path` if the block raises no error.

    A symbolic link is followed. A device or a pipe is written to directly, not replaced.
    """
    path = pathlib.Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    # The prefix keeps the temporary name within the 255 bytes that a file name may have.
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    _remove_abandoned(path)
    try:
        partial.touch()
        mode = stat.S_IMODE((path if path.exists() else partial).stat().st_mode)
        yield partial
        partial.chmod(mode)
        partial.replace(path)
    except OSError as error:
        # A failed write (a full disk) names no file. Callers report the name.
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _remove_abandoned(path: pathlib.Path) -> None:
    """Removes temporary files of `path` that killed processes left behind."""
    for partial in path.parent.glob(f".{glob.escape(path.name[:200])}.*.partial"):
        process = partial.name.split(".")[-2]
        if process.isdecimal() and not _is_alive(int(process)):
            partial.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process exists and belongs to another user
        return True
    return True


@contextlib.contextmanager
def lock(path: str | pathlib.Path, wait: bool = True) -> Iterator[None]:
    """Holds an exclusive lock on the file at `path`, which is created if needed.

    The operating system releases the lock when the process ends, even if it is killed. On a file
    system without locks, every process gets the lock.

    Args:
        path: lock file.
        wait: whether to wait for the lock while another process holds it.

    Raises:
        BlockingIOError: `wait` is false and another process holds the lock.
        OSError: the lock file cannot be opened.
    """
    # The library's own fallback is a file that marks the lock. It would outlive a killed process.
    file_lock = filelock.FileLock(path, fallback_to_soft=False)
    try:
        file_lock.acquire(blocking=wait)
    except filelock.Timeout:
        message = "locked by another process"
        raise BlockingIOError(errno.EWOULDBLOCK, message, str(path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        file_lock.release()


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 hash of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_outputs(files: Iterable[pathlib.Path], folders: Iterable[pathlib.Path]) -> None:
    """Raises InputError if an output file is a folder, or an output folder is not a folder.

    Long runs call it at their start, so that they do not fail after all the work.
    """
    for path in files:
        if path.is_dir():
            raise InputError(f"{path}: expected a file or nothing, found a folder")
    for path in folders:
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: expected a folder or nothing, found a file")


def write(path: str | pathlib.Path, data: str | bytes) -> None:
    """Writes a file atomically; text is encoded as UTF-8."""
    with atomic_write(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)
