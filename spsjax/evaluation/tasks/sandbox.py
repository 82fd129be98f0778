"""Programs that a model wrote, each run in a process of its own with little to break.

A guard against accidents: endless loops, all memory, files written, a network called. It is not one
against a program that was written to break out, or to be called right; run those in a machine that
you can throw away.
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
# end is said by a word that the program is not told, as it may leave early with exit code 0.
_CHILD = """
import _posixsubprocess, os, resource, signal, sys

def prepare():
    seconds, megabytes, file_megabytes = sys.argv[1:]
    sys.argv = ["program"]
    word, _, program = sys.stdin.buffer.read().partition(b"\\n")
    megabyte = 1 << 20
    for limit, value in (
        (resource.RLIMIT_CPU, int(float(seconds)) + 1),
        (resource.RLIMIT_AS, int(megabytes) * megabyte),
        (resource.RLIMIT_FSIZE, int(file_megabytes) * megabyte),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.setitimer(signal.ITIMER_REAL, float(seconds) + 1)  # should the parent be no more
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return lambda: os.write(out, word), program

def guard():
    home = os.path.realpath(os.getcwd()) + os.sep
    refused = (
        "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
        "os.kill", "pty.", "webbrowser.", "urllib.",
    )
    changing = {  # event -> where its paths are, and then their folders
        "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.chmod": 1, "os.chown": 1,
        "os.truncate": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2, "sqlite3.connect": 1,
    }
    realpath, readlink, fsdecode, devnull = os.path.realpath, os.readlink, os.fsdecode, os.devnull
    isinstance_, types, int_, refusal, last = isinstance, (str, bytes), int, PermissionError, -1

    def check(event, path, folder=-1):
        if isinstance_(path, types):
            if isinstance_(folder, int_) and folder >= 0:
                path = readlink(f"/proc/self/fd/{folder}") + "/" + fsdecode(path)
            path = realpath(fsdecode(path))
            if path not in (devnull, home[:-1]) and not path.startswith(home):
                raise refusal(event + " of " + path + " is not allowed here")

    def watch(event, args):
        if event.startswith(refused):
            raise refusal(event + " is not allowed here")
        if event in changing and args[0] != ":memory:":
            for path in args[:changing[event]]:
                check(event, path, -1 if event == "os.truncate" else args[last])
        elif event == "open":
            mode, flags = args[1], args[2]
            if flags & 0o1103 if mode is None else not {*mode}.isdisjoint("wax+"):
                check("writing", args[0])

    def refuse(*args, **options):
        raise refusal("this is not allowed here")

    # No event tells of these.
    os.mknod = os.mkfifo = _posixsubprocess.fork_exec = refuse
    sys.addaudithook(watch)
    sys.setrecursionlimit(10_000)

passed, program = prepare()
guard()
del prepare, guard
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
passed()
"""


def run(program: str, limits: Limits = Limits()) -> Outcome:
    """Runs a program to its end, or to a limit."""
    word = secrets.token_hex(8).encode()
    sizes = str(limits.seconds), str(limits.megabytes), str(limits.file_megabytes)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # Files, not pipes: these have a limit of size, and nobody waits for who holds them open.
        given, said, complaint = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        environment = dict.fromkeys(("HOME", "TMPDIR"), folder)
        environment |= {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}
        given.write(word + b"\n" + program.encode("utf-8", "surrogatepass"))
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _CHILD, *sizes],
            stdin=given,
            stdout=said,
            stderr=complaint,
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
        if _read(said) == word:
            return Outcome(True)
        lines = _read(complaint).decode("utf-8", "replace").strip().splitlines()
    return Outcome(False, lines[-1][:300] if lines else f"left with exit code {child.returncode}")


def _read(file) -> bytes:
    """The last of it."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 10_000, 0))
    return file.read()


def _end(child: subprocess.Popen) -> None:
    """Ends the child and all that it may have started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
