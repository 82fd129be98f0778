"""The sandbox: what a program may do, and what ends it."""

import pathlib
import subprocess
import sys
import time

import pytest

from spsjax.evaluation.tasks import sandbox


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "more than"),
        ("x = [0] * 10**9", "MemoryError"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import sys; sys.exit(0)", "exit code 0"),
        ("raise SystemExit", "exit code 0"),
        ("print('x' * 10**6)\nassert False, 'no'", "no"),
        ("open('/etc/spsjax', 'w')", "not allowed"),
        ("import os; os.open('/tmp/spsjax', os.O_CREAT | os.O_WRONLY)", "not allowed"),
        ("import os; os.remove('/etc/hostname')", "not allowed"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "not allowed"),
        ("import subprocess; subprocess.run(['true'])", "not allowed"),
        ("import os; os.system('true')", "not allowed"),
        ("import os; os.fork()", "not allowed"),
        ("open('big', 'wb').write(b'x' * 10**7)", "File too large"),
        ("def f(", "SyntaxError"),
        ("x = '\\ud800'\nraise ValueError(x)", "ValueError"),
        ("f = lambda: f()\nf()", "Recursion"),
        ("import os; os.write(1, b'passed')\nassert 0", "AssertionError"),
        ("import os; os.rename('/etc/hostname', 'x')", "not allowed"),
        ("import os; os.remove('hostname', dir_fd=os.open('/etc', os.O_RDONLY))", "not allowed"),
        ("import os; os.mkfifo('x')", "not allowed"),
        ("import sqlite3; sqlite3.connect('/tmp/spsjax.db')", "not allowed"),
        (
            "from multiprocessing import util; util.spawnv_passfds(b'/bin/true', [], [])",
            "not allow",
        ),
        ("import sys\nwhile True: sys.stderr.write('x' * 10**6)", "xxx"),
        ("import sys\nassert hasattr(sys.modules['__main__'], 'word')", "AssertionError"),
        ("", None),
        ("import numpy; assert numpy.ones(3).sum() == 3", None),
        (
            "import os, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n"
            "    os.rename(open(folder + '/x', 'w').name, folder + '/y')",
            None,
        ),
        ("import math, re, collections; assert math.pi > 3", None),
        ("open('x', 'w').write('fine'); assert open('x').read() == 'fine'", None),
        ("assert input is not None; import sys; assert sys.stdin.read() == ''", None),
    ],
)
def test_sandbox_keeps_a_program_within_its_limits(program, reason):
    """A program may compute and write in its folder, and do nothing else."""
    start = time.perf_counter()
    outcome = sandbox.run(program, sandbox.Limits(seconds=2.0, megabytes=512))
    assert time.perf_counter() - start < 20
    assert outcome.passed == (reason is None)
    assert (reason or "") in outcome.reason, outcome.reason


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_sandbox_program_ends_if_its_parent_is_killed(tmp_path):
    """A program ends by itself if its parent was killed."""
    mark = tmp_path / "alive"
    program = "import time\nwhile True: time.sleep(0.05)"
    parent = f"""
import pathlib, subprocess
from spsjax.evaluation.tasks import sandbox
real = subprocess.Popen
def started(*args, **options):
    child = real(*args, **options)
    pathlib.Path({str(mark)!r}).write_text(str(child.pid))
    return child
subprocess.Popen = started
sandbox.run({program!r}, sandbox.Limits(seconds=1.0))
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
