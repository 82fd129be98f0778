"""Turns of processes that prepare beside each other, and measure one after another."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator


class Turns:
    """A process's place among those that share a lock file.

    From the start the process is one of those that prepare. It gets its turn when no other
    prepares or measures.

    Args:
        path: the lock file; None: there are no others.
    """

    def __init__(self, path: str | pathlib.Path | None):
        # Open as long as the process: closing it would give the lock back.
        self._file = None if path is None else open(path, "a+")  # noqa: SIM115
        self._lock(fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for the turn, in which no other process prepares or measures; ends it after."""
        self._lock(fcntl.LOCK_EX)  # gives the shared lock back first, so that two can wait
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN)

    def _lock(self, kind: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, kind)
