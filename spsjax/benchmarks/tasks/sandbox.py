"""Sandbox for programs that a model wrote: each runs in processes of its own, with limits.

Where the system allows it, a program runs behind a boundary of the kernel: namespaces of users,
processes, mounts, networks and IPC, without capabilities. Of the files outside, it sees only the
interpreter and the system's libraries, and cannot write them. Its own folder is a small tmpfs.
Elsewhere an audit hook guards against accidents only; a warning says so.

Tests decide in a process that shares no memory with the program (see `_sandbox_child.py`).

Limits bound the address space and the open files of each process, the size of each file, and the
size of the folder. `unshare` also bounds the number of files, bubblewrap does not. On x86-64 and
ARM64, system calls for memory that no limit counts are refused: shared memory, queues and
semaphores of System V, and files in memory. The number of processes is not bounded.

What else remains possible behind the boundary: a program without tests can pretend to have reached
its end; programs share the kernel and its flaws with the system. Without the boundary, a determined
program can do what its user can.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a program."""

    seconds: float = 3.0  # wall time
    megabytes: int = 1024  # memory of each process
    file_megabytes: int = 1  # size of each file that it writes, in a folder that is then removed
    folder_megabytes: int = 64  # size of all files


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a program."""

    passed: bool  # whether its tests ran to their end, or the program itself if it has no tests
    reason: str = ""  # last line of its error output, or the limit that ended it


# Function of a program's folder and its limits to the command behind which the program runs.
Boundary = Callable[[str, Limits], list[str]]

_TAIL_BYTES, _MOST_REASON = 10_000, 300  # of output that is read, and of a reason that is kept
_CHILD = pathlib.Path(__file__).with_name("_sandbox_child.py")
_DEVICES = "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"
_UNSHARE = """
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
folder=$1 megabytes=$2
shift 2
echo 0 > /proc/sys/user/max_user_namespaces
mount -t tmpfs -o mode=755 none "$folder"
cd "$folder"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p ".$1"; else mkdir -p ".${1%/*}"; : > ".$1"; fi
    mount --bind -o ro "$1" ".$1"
    shift
done
shift
mkdir -p old proc ".$folder"
mount -t proc -o ro none proc
mount -t tmpfs -o size="${megabytes}m",nr_inodes=1k none ".$folder"
pivot_root . old
cd "$folder"
umount -l /old
mount -o remount,bind,ro /
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


def run(program: str, tests: str = "", limits: Limits = Limits()) -> Outcome:
    """Runs a program and its tests to their end or to a limit, and returns the outcome.

    Args:
        program: text of the program.
        tests: text that runs after the program, in another process. There, `remote("name")` is a
            function that calls the program's function `name`, with plain data in both directions.
        limits: limits of the program.
    """
    return _run(best_boundary(), program, tests, limits)


@functools.cache
def best_boundary() -> Boundary:
    """Returns the best boundary that works on this system; warns if there is none."""
    for candidate in bubblewrap, unshare:
        if works(candidate):
            return candidate
    warnings.warn(
        "sandbox: expected bubblewrap or unshare to make namespaces, found that neither can; "
        "programs are kept from accidents only. Install bubblewrap, or use a disposable machine.",
        stacklevel=3,
    )
    return no_boundary


@functools.cache
def works(boundary: Boundary) -> bool:
    """Returns whether a program behind the boundary runs in a namespace of processes."""
    tests = "import os; assert os.getpid() == 1"
    try:
        return _run(boundary, "", tests, Limits(seconds=20)).passed
    except FileNotFoundError:  # bubblewrap or util-linux is not installed
        return False


def bubblewrap(folder: str, limits: Limits) -> list[str]:
    """Returns the command that runs another one in namespaces by bubblewrap (0.8 or later)."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user"]
    command += ["--disable-userns", "--as-pid-1", "--cap-drop", "ALL"]
    for path in _readable():
        command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(limits.folder_megabytes << 20), "--tmpfs", folder]
    return [*command, "--remount-ro", "/", "--chdir", folder, "--"]


def unshare(folder: str, limits: Limits) -> list[str]:
    """Returns the command that runs another one in namespaces by the tools of util-linux."""
    command = [shutil.which("unshare") or "unshare", "--map-root-user", "--mount", "--pid", "--net"]
    command += ["--ipc", "--uts", "--cgroup", "--fork", "--kill-child", "sh", "-c", _UNSHARE, "sh"]
    return [*command, folder, str(limits.folder_megabytes), *_readable(), *_DEVICES, "--"]


def no_boundary(folder: str, limits: Limits) -> list[str]:
    """Returns the empty command."""
    return []


def _readable() -> list[str]:
    """Returns the paths outside its folder that a program can read, which Python needs."""
    prefixes = sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)
    system = "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"
    return list(filter(os.path.exists, dict.fromkeys((*system, *prefixes, str(_CHILD.parent)))))


def _run(boundary: Boundary, program: str, tests: str, limits: Limits) -> Outcome:
    """Does what `run` does, behind the boundary."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as stderr:
        # A file instead of a pipe: the limit of file sizes holds for it, and no read has to wait
        # until every process that the program started has closed its end.
        environment = dict.fromkeys(("HOME", "TMPDIR"), folder)
        environment |= {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}
        command = [*boundary(folder, limits), sys.executable, "-I", "-X", "utf8", str(_CHILD)]
        command += map(str, dataclasses.astuple(limits))
        streams: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.DEVNULL,
            "stderr": stderr,
        }
        options: dict[str, Any] = {"cwd": folder, "env": environment, "start_new_session": True}
        child = subprocess.Popen(command, **streams, **options)
        try:
            child.communicate(pickle.dumps((program, tests)), limits.seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"took more than {limits.seconds:g} s")
        finally:
            _end(child)
        lines = _tail(stderr).decode("utf-8", "replace").strip().splitlines()
    if child.returncode == 0:
        return Outcome(True)
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
    child.stdin.close()
    child.wait()
