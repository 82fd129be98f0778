"""The sandbox: what a program may do, and what ends it."""

import ctypes
import os
import pathlib
import resource
import subprocess
import sys
import time
import warnings

import pytest

from spsjax.benchmarks.tasks import sandbox

pytestmark = pytest.mark.process  # of the programs
BOUNDARIES = sandbox.unshare, sandbox.bubblewrap


def use(boundary, monkeypatch):
    """Makes the sandbox use a boundary, or skips the test if it does not work here."""
    if boundary is not sandbox.no_boundary and not sandbox.works(boundary):
        pytest.skip(f"{boundary.__name__} makes no namespaces on this system")
    monkeypatch.setattr(sandbox, "best_boundary", lambda: boundary)


@pytest.fixture(params=["hook", "boundary"])
def walls(request, monkeypatch):
    """The sandbox without a boundary, and with this system's best one."""
    best = next(filter(sandbox.works, reversed(BOUNDARIES)), BOUNDARIES[0])
    use(sandbox.no_boundary if request.param == "hook" else best, monkeypatch)


@pytest.fixture(params=BOUNDARIES, ids=lambda boundary: boundary.__name__)
def boundary(request, monkeypatch):
    use(request.param, monkeypatch)


@pytest.fixture
def outside(tmp_path):
    """A folder outside of the program's, with a file, a folder, and a look at both."""
    (tmp_path / "file").write_text("unchanged")
    (tmp_path / "folder").mkdir()

    def look():
        paths = sorted([tmp_path, *tmp_path.rglob("*")])
        states = [path.lstat() for path in paths]
        return paths, [(s.st_mode, s.st_nlink, s.st_uid, s.st_mtime_ns) for s in states]

    before = look()
    yield tmp_path
    assert look() == before
    assert (tmp_path / "file").read_text() == "unchanged"


@pytest.fixture
def victim():
    """A process of the same user, as the sandbox's caller is one: alive, running, unlimited."""
    process = subprocess.Popen(["sleep", "60"])

    def look():
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        return os.sched_getaffinity(process.pid), limits

    before = look()
    yield process.pid
    state = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]
    after = look()
    process.kill()
    process.wait()
    assert state in "RS" and after == before


@pytest.fixture
def segment():
    libc = ctypes.CDLL(None)
    identifier = libc.shmget(0, 1, 0o600)
    yield identifier
    libc.shmctl(identifier, 0, None)  # IPC_RMID


PROGRAMS = {
    "more than": ["while True: pass"],
    "MemoryError": ["x = [0] * 10**9"],
    "exit code 0": ["import os; os._exit(0)", "raise SystemExit"],
    "exit code 3": ["import os; os._exit(3)"],
    "no": ["print('x' * 10**6)\nassert False, 'no'"],
    "not allowed": [
        "open('/etc/spsjax', 'w')",
        "import os; os.open('/tmp/spsjax', os.O_CREAT | os.O_WRONLY)",
        "import os; os.remove('/etc/hostname')",
        "import os; os.remove('hostname', dir_fd=os.open('/etc', os.O_RDONLY))",
        *("import os; os.system('true')", "import os; os.fork()", "import os; os.mkfifo('x')"),
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import subprocess; subprocess.run(['true'])",
        "import sqlite3; sqlite3.connect('/tmp/spsjax.db')",
        "from multiprocessing import util; util.spawnv_passfds(b'/bin/true', [], [])",
    ],
    "File too large": ["open('big', 'wb').write(b'x' * 10**7)"],
    "so many files": ["for i in range(100): open(str(i), 'w')"],
    "SyntaxError": ["def f("],
    "ValueError": ["x = '\\ud800'\nraise ValueError(x)"],
    "Recursion": ["f = lambda: f()\nf()"],
    "AssertionError": ["import os; os.write(1, b'passed')\nassert 0"],
    "xxx": ["import sys\nwhile True: sys.stderr.write('x' * 10**6)"],
    None: [
        "",
        "import numpy, math, re; assert numpy.ones(3).sum() == 3 < math.pi",
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n"
        "    os.rename(open(folder + '/x', 'w').name, folder + '/y')",
        "open('x', 'w').write('fine'); assert open('x').read() == 'fine'",
        "assert input is not None; import sys; assert sys.stdin.read() == ''",
    ],
}


@pytest.mark.parametrize(
    ("program", "reason"),
    [(program, reason) for reason, programs in PROGRAMS.items() for program in programs],
)
def test_sandbox_keeps_a_program_within_its_limits(walls, program, reason):
    start = time.perf_counter()
    outcome = sandbox.run(program, limits=sandbox.Limits(seconds=2.0, megabytes=512))
    assert time.perf_counter() - start < 20
    assert outcome.passed == (reason is None)
    assert (reason or "") in outcome.reason, outcome.reason


CHANGES = (
    *("os.rename(F, 'y')", "os.rename('x', D + '/y')", "os.replace('x', F)"),
    *("os.truncate(F, 0)", "os.link(F, 'y')", "os.link('x', D + '/y')"),
    *("os.symlink('x', D + '/y')", "os.chmod(F, 0o600)", "os.chown(F, 1, 1)"),
    *("os.mkdir(D + '/y')", "os.rmdir(D + '/folder')", "os.remove(F)"),
    *("open(D + '/y', 'x')", "open(D + '/y', 'w')", "open(F, 'a')", "open(F, 'r+')"),
    *("os.open(F, os.O_WRONLY)", "os.open(F, os.O_RDWR)"),
    "os.open(F, os.O_RDONLY | os.O_TRUNC)",
    "os.open(D + '/y', os.O_RDONLY | os.O_CREAT)",
)


def test_sandbox_refuses_every_change_outside(monkeypatch, outside):
    use(sandbox.no_boundary, monkeypatch)
    program = f"""
import os
D = {str(outside)!r}; F = D + '/file'; open('x', 'w').close()
for call in {CHANGES}:
    try:
        exec(call)
    except PermissionError as error:
        assert "not allowed" in str(error), (call, error)
    else:
        raise AssertionError(call)
"""
    outcome = sandbox.run(program)
    assert outcome.passed, outcome.reason


LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
ATTACKS = {  # each raises an exception if it fails; the hook sees none of them
    "kill": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)",
    "freeze": LIBC + "assert libc.ptrace(16, VICTIM, 0, 0) == 0",
    "affinity": "import os; os.sched_setaffinity(VICTIM, {max(os.sched_getaffinity(0))})",
    "limits": "import resource as r; r.prlimit(VICTIM, r.RLIMIT_NOFILE, (9, 9))",
    "checker": LIBC + "assert libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "dir_fd": "import os; root = os.open('/', os.O_RDONLY)\n"
    "os.open(OUTSIDE[1:] + '/x', os.O_CREAT | os.O_WRONLY, dir_fd=root)",
    "attach": "import sqlite3; sqlite3.connect(':memory:').executescript("
    "f\"attach '{OUTSIDE}/x' as x; create table x.t (a)\")",
    "uri": "import sqlite3; sqlite3.connect("
    "f'file:{OUTSIDE}/x?mode=rwc', uri=True).execute('create table t (a)')",
    "readline": "import readline; readline.write_history_file(OUTSIDE + '/x')",
    "mkfifo": "import posix; posix.mkfifo(OUTSIDE + '/x')",
    "interpreter": "try: import _interpreters as s\nexcept ImportError: import _xxsubinterpreters "
    "as s\nassert s.run_string(s.create(), f\"open('{OUTSIDE}/x', 'w')\") is None",
    "libc": LIBC + "assert libc.creat(f'{OUTSIDE}/x'.encode(), 0o600) >= 0",
    "root": LIBC + "paths = b'/x', b'/dev/x', b'/dev/shm/x', b'/usr/x', b'/proc/self/comm'\n"
    "assert any(libc.creat(path, 0o600) >= 0 for path in paths)",
    "old": "import os; assert os.listdir('/old')",
    "mounts": "import os; points = [line.split()[4] for line in open('/proc/self/mountinfo')]\n"
    "assert any(os.path.exists(point + OUTSIDE) for point in points)",
    "attach segment": LIBC + "assert libc.shmat(SEGMENT, None, 0) != -1",
    "make segment": LIBC + "assert libc.shmget(0, 1, 0o600) >= 0",
    "make segment by a call of 32 bits": LIBC + "import mmap; page = mmap.mmap(-1, 4096, prot=7)\n"
    "page.write(bytes.fromhex('53b88b01000031dbb901000000ba80010000cd805bc3'))\n"
    "start = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
    "assert ctypes.CFUNCTYPE(ctypes.c_int)(start)() >= 0",
    "make queue": LIBC + "assert libc.msgget(0, 0o600) >= 0",
    "make semaphore": LIBC + "assert libc.semget(0, 1, 0o600) >= 0",
    "memfd": "import os; os.memfd_create('x')",
    "memfd_secret": LIBC + "assert libc.syscall(447, 0) >= 0",
    "descriptors": "import os, resource as r; most = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
    "r.setrlimit(r.RLIMIT_NOFILE, (most, most))\nfor _ in range(300): os.dup(0)",
    "network": "import socket; assert len(socket.if_nameindex()) > 1",
    "mount": LIBC + "assert libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0",
    "namespace": LIBC + "assert libc.unshare(0x10000000) == 0",
    "total": LIBC + "for i in range(100):\n"
    "    assert os.write(libc.creat(b'%d' % i, 0o600), bytes(10**6))",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_boundary_withstands_an_attack(boundary, outside, victim, segment, name):
    names = {"VICTIM": victim, "OUTSIDE": str(outside), "SEGMENT": segment}
    program = "".join(f"{key} = {value!r}\n" for key, value in names.items()) + ATTACKS[name]
    outcome = sandbox.run(program, limits=sandbox.Limits(folder_megabytes=8))
    assert not outcome.passed and "ModuleNotFound" not in outcome.reason
    assert "not allowed" not in outcome.reason and "more than" not in outcome.reason


def test_unshare_bounds_the_number_of_files(monkeypatch):
    """Empty files and folders have no size, but take memory of the kernel."""
    use(sandbox.unshare, monkeypatch)
    outcome = sandbox.run("import os\nfor i in range(2000): os.mkdir(str(i))")
    assert "No space left" in outcome.reason, outcome.reason


@pytest.mark.parametrize(
    "program",
    [
        "f = lambda: 0",
        "import os; f = lambda: os._exit(0)",
        "f = lambda: exit()",
        "class Equal:\n    __eq__ = lambda *_: True\nf = Equal",
        "class Equal(int):\n    __eq__ = lambda *_: True\nf = Equal",
        "class Exit:\n    def __reduce__(self): return exec, ('import os; os._exit(0)',)\nf = Exit",
        "import math\nf = lambda: setattr(math, 'fabs', lambda x: 1) or 0",
        "import sys\ndef f():\n    frame = sys._getframe()\n    while frame:\n"
        "        frame.f_globals.update(remote=lambda name: lambda: 1, f=lambda: 1)\n"
        "        frame = frame.f_back\n    return 0",
        "import os, pickle\nfor fd in range(3, 50):\n"
        "    try: os.write(fd, pickle.dumps(0))\n    except OSError: pass\nf = lambda: 1",
        "import __main__\n__main__._check = __main__.ask = lambda *_: 1\nf = lambda: 0",
    ],
)
def test_sandbox_program_cannot_forge_a_pass(walls, program):
    tests = "import math; assert math.fabs(remote('f')()) == 1"
    assert not sandbox.run(program, tests).passed


def test_sandbox_results_arrive_as_plain_data(walls):
    data = "[1, (2.5, 'x'), {None: {3}}, b'y', 1j, True]"
    values = f"{data}, numpy.float32(0.5), numpy.bool_(True), collections.Counter('aab'), int"
    program = f"import collections, numpy\nresults = {values}, range(3)\nf = results.__getitem__"
    expected = f"{data}, 0.5, True, {{'a': 2, 'b': 1}}, int, range(3)"
    tests = f"for i, value in enumerate(({expected})): assert remote('f')(i) == value, value"
    outcome = sandbox.run(program, tests)
    assert outcome.passed, outcome.reason


def test_sandbox_tells_iterators_from_lists_and_why_a_test_failed(walls):
    assert sandbox.run("f = lambda: 1", "import math; assert math.fabs(remote('f')()) == 1").passed
    tests = "assert remote('f')([1, 2]) != [1, 4]; assert list(remote('f')([1, 2])) == [1, 4]"
    assert sandbox.run("def f(x): return (y * y for y in x)", tests).passed
    outcome = sandbox.run("f = lambda: 0", "assert remote('f')() == 1, 'wrong'")
    assert outcome == sandbox.Outcome(False, "AssertionError: wrong")


def test_sandbox_without_namespaces_warns(monkeypatch):
    monkeypatch.setattr(sandbox, "works", lambda boundary: False)
    with pytest.warns(UserWarning, match="kept from accidents only"):
        assert sandbox.best_boundary.__wrapped__() is sandbox.no_boundary
    monkeypatch.setattr(sandbox, "works", lambda boundary: True)
    with warnings.catch_warnings(action="error"):
        assert sandbox.best_boundary.__wrapped__() is sandbox.bubblewrap


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_sandbox_program_ends_if_its_parent_is_killed(walls, tmp_path):
    mark = tmp_path / "alive"
    program = "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(60)"
    parent = f"""
import pathlib, subprocess
from spsjax.benchmarks.tasks import sandbox
real = subprocess.Popen
def started(*args, **options):
    child = real(*args, **options)
    pathlib.Path({str(mark)!r}).write_text(str(child.pid))
    return child
subprocess.Popen = started
sandbox.best_boundary = lambda: sandbox.{sandbox.best_boundary().__name__}
sandbox.run({program!r}, limits=sandbox.Limits(seconds=1.0))
"""
    process = subprocess.Popen([sys.executable, "-c", parent])
    while not mark.exists() or not mark.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    child = pathlib.Path("/proc") / mark.read_text()
    for _ in range(100):
        if not child.exists() or "(zombie)" in (child / "status").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child is still running")
