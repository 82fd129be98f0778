"""Child process of `sandbox.run`: limits itself, refuses harmful calls, and runs a program.

It is run as a script and imports only the standard library. Its arguments are seconds, megabytes
and megabytes per file. Its standard input is a secret word, a newline and the program. It writes
the word when the program has reached its end, because a program may also exit early with code 0.
"""

import _posixsubprocess
import os
import resource
import signal
import sys

_MEGABYTE = 1 << 20
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_REFUSED = (  # prefixes of audit events
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "pty.",
    "webbrowser.",
    "urllib.",
)
_NUM_PATHS = {  # number of paths among the first arguments of an event; folders are the last ones
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.truncate": 1,
    "os.rename": 2,
    "os.link": 2,
    "os.symlink": 2,
    "sqlite3.connect": 1,
}


def main() -> None:
    """Runs the program of the standard input."""
    finish, program = _prepare()
    _guard()
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    finish()


def _prepare():
    """Reads the input and sets the limits; returns what to call at the end, and the program."""
    seconds, megabytes, file_megabytes = sys.argv[1:]
    sys.argv = ["program"]
    word, _, program = sys.stdin.buffer.read().partition(b"\n")
    for limit, value in (
        (resource.RLIMIT_CPU, int(float(seconds)) + 1),
        (resource.RLIMIT_AS, int(megabytes) * _MEGABYTE),
        (resource.RLIMIT_FSIZE, int(file_megabytes) * _MEGABYTE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    # The parent ends this process after its time. The timer does if the parent has been killed.
    signal.setitimer(signal.ITIMER_REAL, float(seconds) + 1)
    output = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return lambda: os.write(output, word), program


def _guard() -> None:
    """Installs an audit hook that refuses processes, networks, and writes outside this folder."""
    home = os.path.realpath(os.getcwd()) + os.sep
    # The program may rebind names of modules and builtins. The hook uses its own references.
    realpath, readlink, fsdecode, devnull = os.path.realpath, os.readlink, os.fsdecode, os.devnull
    is_instance, path_types, integer, refusal = isinstance, (str, bytes), int, PermissionError
    refused, num_paths, write_flags, last = _REFUSED, _NUM_PATHS, _WRITE_FLAGS, -1

    def check(event, path, folder=-1):
        if is_instance(path, path_types):
            if is_instance(folder, integer) and folder >= 0:
                path = readlink(f"/proc/self/fd/{folder}") + "/" + fsdecode(path)
            path = realpath(fsdecode(path))
            if path not in (devnull, home[:-1]) and not path.startswith(home):
                raise refusal(event + " of " + path + " is not allowed here")

    def watch(event, args):
        if event.startswith(refused):
            raise refusal(event + " is not allowed here")
        if event in num_paths and args[0] != ":memory:":
            for path in args[: num_paths[event]]:
                check(event, path, -1 if event == "os.truncate" else args[last])
        elif event == "open":
            mode, flags = args[1], args[2]
            if flags & write_flags if mode is None else not {*mode}.isdisjoint("wax+"):
                check("writing", args[0])

    def refuse(*args, **options):
        raise refusal("this is not allowed here")

    # These raise no audit event.
    os.mknod = os.mkfifo = _posixsubprocess.fork_exec = refuse
    sys.addaudithook(watch)
    sys.setrecursionlimit(10_000)


if __name__ == "__main__":
    main()
