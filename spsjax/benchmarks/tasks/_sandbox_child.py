"""Child process of `sandbox.run`: a checker that runs the tests, and a fork that runs the program.

It is run as a script and imports only the standard library. Its arguments are seconds, megabytes,
megabytes per file and megabytes of all files. Its standard input is a pickled pair of the program
and its tests. Its exit code is 0 exactly if the tests have run to their end.

The fork is made before the checker reads its input, so the memory of the program never holds the
tests. They call a function of the program by `remote("name")(*args)`. Arguments and results travel
as plain data through pipes, so a result cannot bring its own `__eq__`.
"""

import _posixsubprocess
import collections.abc
import errno
import os
import pickle
import resource
import signal
import struct
import sys

_MEGABYTE = 1 << 20
_MOST_FILES = 256  # that a process has open: each pipe and socket has buffers in the kernel
_SET_DUMPABLE, _SET_SECCOMP, _NO_NEW_PRIVS = 4, 22, 38  # options of prctl(2)
# Audit number of each kind of machine, and its numbers of the system calls that make memory which
# no limit counts: shmget, semget, msgget, memfd_create, memfd_secret.
_MEMORY_CALLS = {
    "x86_64": (0xC000003E, 29, 64, 68, 319, 447),
    "aarch64": (0xC00000B7, 194, 190, 186, 279, 447),
}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of a seccomp(2) filter
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000  # what a filter returns; the latter plus an error number
_KINDS = bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset
# Only immutable types: a pickle could set `Fraction.__eq__`, but not `int.__eq__`.
_ALLOWED = {kind.__name__ for kind in _KINDS} | {"iter", "range"}
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


class _Pickler(pickle.Pickler):
    """Pickler of results, which turns instances of subclasses of plain types into plain data."""

    def reducer_override(self, value):
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()  # a scalar of NumPy
            return type(value), (value,)
        if isinstance(value, collections.abc.Iterator):
            return iter, (list(value),)
        for kind in _KINDS:
            if isinstance(value, kind) and type(value) is not kind:
                return kind, (kind(value),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Unpickler of results, which builds plain data only."""

    def find_class(self, module, name):
        if module != "builtins" or name not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
        return super().find_class(module, name)


def main() -> None:
    """Forks into the checker and the program's process."""
    seconds, megabytes, file_megabytes, folder_megabytes = map(float, sys.argv[1:])
    sys.argv = ["program"]
    _limit(seconds, megabytes, file_megabytes)
    if sys.platform == "linux":
        _hide_memory()
        _refuse_uncounted_memory()
    (theirs_in, requests), (replies, theirs_out) = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(theirs_in)
        os.close(theirs_out)
    else:
        os.close(requests)
        os.close(replies)
    # The sandbox ends these processes after their time. The timers do if it was killed. The first
    # process of a namespace ignores signals that have no handler.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)
    max_writes = int(folder_megabytes // file_megabytes)
    if child:
        reader, writer = _files(replies, requests)
        _check(reader, writer, child, max_writes)
    else:
        reader, writer = _files(theirs_in, theirs_out)
        _serve(reader, writer, max_writes)


def _files(source: int, sink: int):
    """Returns files of two pipes: one to read, one to write.

    The latter has no buffer, so that nothing is left to flush at the exit, when the pipe is broken.
    """
    return os.fdopen(source, "rb"), os.fdopen(sink, "wb", buffering=0)


def _limit(seconds: float, megabytes: float, file_megabytes: float) -> None:
    """Sets the limits of this process and of its children."""
    for limit, value in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, int(megabytes * _MEGABYTE)),
        (resource.RLIMIT_FSIZE, int(file_megabytes * _MEGABYTE)),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _hide_memory() -> None:
    """Keeps processes without capabilities from the memory of this process."""
    import ctypes

    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _refuse_uncounted_memory() -> None:
    """Refuses the system calls of `_MEMORY_CALLS` to this process and its children.

    The filter loads the machine of a call, then its number. It jumps to its last instruction, a
    failure, if the call is of another machine (32 bits), if its number belongs to the x32 interface
    (2**30 and above), or if the number is in the list.
    """
    if os.uname().machine not in _MEMORY_CALLS:
        return
    import ctypes

    machine, *calls = _MEMORY_CALLS[os.uname().machine]
    last = len(calls) + 5
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 0, last - 2, machine), (_LOAD, 0, 0, 0)]
    for test, number in ((_AT_LEAST, 1 << 30), *((_EQUAL, call) for call in calls)):
        code.append((test, last - len(code) - 1, 0, number))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HP", len(code), ctypes.addressof(text))
    libc = ctypes.CDLL(None)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_SET_SECCOMP, 2, program)


def _check(replies, requests, child: int, max_writes: int) -> None:
    """Runs the tests, which decide."""

    def ask(request):
        try:
            requests.write(pickle.dumps(request))
            return _Unpickler(replies).load()
        except (EOFError, BrokenPipeError):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            # With code 1, the program has written the reason itself.
            sys.exit(f"left with exit code {code}" if code != 1 else 1)

    def remote(name):
        return lambda *args: ask((name, args))

    program, tests = pickle.load(sys.stdin.buffer)
    _guard(max_writes)
    ask(program)
    exec(compile(tests, "tests", "exec"), {"__name__": "__main__", "remote": remote})


def _serve(requests, replies, max_writes: int) -> None:
    """Runs the program, and calls its functions as the checker requests."""
    names = {"__name__": "__main__"}
    program = pickle.load(requests)
    _guard(max_writes)
    sys.setrecursionlimit(10_000)
    exec(compile(program, "program", "exec"), names)
    _Pickler(replies).dump(None)
    while True:
        try:
            name, args = pickle.load(requests)
        except EOFError:  # the checker has ended
            os._exit(0)
        _Pickler(replies).dump(names[name](*args))


def _guard(max_writes: int) -> None:
    """Installs an audit hook that refuses processes, networks, and writes outside this folder."""
    home = os.path.realpath(os.getcwd()) + os.sep
    # The program may rebind names of modules and builtins. The hook uses its own references.
    realpath, readlink, fsdecode, devnull = os.path.realpath, os.readlink, os.fsdecode, os.devnull
    is_instance, path_types, integer, refusal = isinstance, (str, bytes), int, PermissionError
    refused, num_paths, write_flags, last = _REFUSED, _NUM_PATHS, _WRITE_FLAGS, -1
    writes, advance = iter(range(max_writes)), next

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
                if advance(writes, None) is None:  # this bounds the total size of files
                    raise refusal("writing of so many files is not allowed here")

    def refuse(*args, **options):
        raise refusal("this is not allowed here")

    # These raise no audit event.
    os.mknod = os.mkfifo = _posixsubprocess.fork_exec = refuse
    sys.addaudithook(watch)


if __name__ == "__main__":
    main()
