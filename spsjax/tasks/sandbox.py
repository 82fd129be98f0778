"""Programs that a model wrote, each run in a process of its own with little to break.

A guard against accidents: endless loops, all memory, files written, a network called. It is not one
against a program that was written to break out; run those in a machine that you can throw away.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import tempfile


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of wall time.
        megabytes: of memory.
        file_megabytes: of each file that it writes, in a folder that is then removed.
    """

    seconds: float = 3.0
    megabytes: int = 1024
    file_megabytes: int = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`passed`: ran to its end; else `reason` is its last line, or what stopped it."""

    passed: bool
    reason: str = ""


# Runs in the child: limits first, then what may not be done, then the program. That it came to its
# end is said by a word that the program does not know, as it may leave early with exit code 0.
_CHILD = """
import os, resource, sys

seconds, megabytes, file_megabytes, word = sys.argv[1:]
sys.argv = ["program"]
program = sys.stdin.buffer.read()
megabyte = 1 << 20
for limit, value in (
    (resource.RLIMIT_CPU, int(float(seconds)) + 1),
    (resource.RLIMIT_AS, int(megabytes) * megabyte),
    (resource.RLIMIT_FSIZE, int(file_megabytes) * megabyte),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
home = os.path.realpath(os.getcwd()) + os.sep
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)
os.dup2(null, 1)
refused = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link",
    "os.symlink", "os.truncate", "shutil.", "ctypes.", "pty.", "webbrowser.", "urllib.",
)
kept = (os.path.realpath, isinstance, str, bytes, PermissionError, os.fsdecode, os.devnull)

def watch(event, args, refused=refused, home=home, kept=kept):
    realpath, isinstance, str, bytes, PermissionError, fsdecode, devnull = kept
    if event.startswith(refused):
        raise PermissionError(event + " is not allowed here")
    if event == "open" and isinstance(args[0], (str, bytes)):
        mode, flags = args[1], args[2]
        writes = flags & 0o1103 if mode is None else not {*mode}.isdisjoint("wax+")
        path = realpath(fsdecode(args[0]))
        if writes and path != devnull and not path.startswith(home):
            raise PermissionError("writing " + path + " is not allowed here")

sys.addaudithook(watch)
sys.setrecursionlimit(10_000)
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
os.write(out, word.encode())
"""


def run(program: str, limits: Limits = Limits()) -> Outcome:
    """Runs a program to its end, or to a limit."""
    word = secrets.token_hex(8)
    sizes = str(limits.seconds), str(limits.megabytes), str(limits.file_megabytes), word
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _CHILD, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            given = program.encode("utf-8", "surrogatepass")
            said, complaint = child.communicate(given, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"took more than {limits.seconds:g} s")
        finally:
            _end(child)
    if said.decode("utf-8", "replace") == word:
        return Outcome(True)
    lines = complaint.decode("utf-8", "replace").strip().splitlines()
    return Outcome(False, lines[-1][:300] if lines else f"left with exit code {child.returncode}")


def _end(child: subprocess.Popen) -> None:
    """Ends the child and all that it may have started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
