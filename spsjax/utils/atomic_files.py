"""Files that are written whole or not at all."""

import contextlib
import fcntl
import glob
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def atomic_write(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Where to write what becomes the file at `path` at the end, unless an error comes before.

    A link is followed, and a device or a pipe is written to, not replaced.
    """
    path = pathlib.Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    _forget(path)
    try:
        partial.touch()
        mode = stat.S_IMODE((path if path.exists() else partial).stat().st_mode)
        yield partial
        partial.chmod(mode)
        partial.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # who is told of a full disk wants to know
        raise
    finally:
        partial.unlink(missing_ok=True)


def _forget(path: pathlib.Path) -> None:
    """Removes what processes that were killed have left of this file."""
    for partial in path.parent.glob(f".{glob.escape(path.name[:200])}.*.partial"):
        process = partial.name.split(".")[-2]
        if process.isdecimal() and not _alive(int(process)):
            partial.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def lock(path: str | pathlib.Path, wait: bool = True) -> Iterator[None]:
    """Held by one at a time; a process that ends, however, gives it back.

    Where the file system knows no locks, everyone holds it. Raises BlockingIOError if another one
    holds it and `wait` is false.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield


def sha256(path: pathlib.Path) -> str:
    """The hash of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: str | pathlib.Path, data: str | bytes) -> None:
    """Writes a file whole; text is UTF-8."""
    with atomic_write(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)
