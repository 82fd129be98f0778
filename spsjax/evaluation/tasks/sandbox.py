"""Sandbox for programs that a model wrote: each runs in a process of its own, with limits.

It guards against accidents: endless loops, exhausted memory, files written, networks used. It does
not guard against a program that was written to break out or to pass the check unduly. Run such
programs in a disposable machine.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: wall time.
        megabytes: memory.
        file_megabytes: size of each file that it writes, in a folder that is then removed.
    """

    seconds: float = 3.0
    megabytes: int = 1024
    file_megabytes: int = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
        passed: whether it ran to its end.
        reason: last line of its error output, or the limit that ended it.
    """

    passed: bool
    reason: str = ""


_TAIL_BYTES, _MOST_REASON = 10_000, 300  # of output that is read, and of a reason that is kept
_CHILD = pathlib.Path(__file__).with_name("_sandbox_child.py")


def run(program: str, limits: Limits = Limits()) -> Outcome:
    """Runs a program to its end or to a limit, and returns the outcome."""
    word = secrets.token_hex(8).encode()
    sizes = str(limits.seconds), str(limits.megabytes), str(limits.file_megabytes)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # Files instead of pipes: the limit of file sizes holds for them, and no read has to wait
        # until every process that the program started has closed its end.
        stdin, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        environment = dict.fromkeys(("HOME", "TMPDIR"), folder)
        environment |= {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}
        stdin.write(word + b"\n" + program.encode("utf-8", "surrogatepass"))
        stdin.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(_CHILD), *sizes],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            child.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"took more than {limits.seconds:g} s")
        finally:
            _end(child)
        if _tail(stdout) == word:
            return Outcome(True)
        lines = _tail(stderr).decode("utf-8", "replace").strip().splitlines()
    return Outcome(
        False, lines[-1][:_MOST_REASON] if lines else f"left with exit code {child.returncode}"
    )


def _tail(file) -> bytes:
    """Returns the end of a file."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - _TAIL_BYTES, 0))
    return file.read()


def _end(child: subprocess.Popen) -> None:
    """Kills the child and every process of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
