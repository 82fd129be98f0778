"""Tests of atomic writes and file locks."""

import errno
import fcntl
import os
import stat
import subprocess
import sys

import pytest
from helpers.environment import ROOT

from spsjax.utils import atomic_files

# Takes a lock and holds it until its input ends.
HOLDER = """
import sys
from spsjax.utils import atomic_files
print("started", flush=True)
with atomic_files.lock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock `tmp_path/.lock`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / ".lock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() + process.stdout.readline() == b"started\nlocked\n"
        yield process
        process.kill()


def test_write_that_fails_keeps_old_file(tmp_path):
    path = tmp_path / "figures.json"
    atomic_files.write(path, "old")
    with pytest.raises(KeyError), atomic_files.atomic_write(path) as partial:
        partial.write_text("ne")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["figures.json"]
    atomic_files.write(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"


def test_write_follows_link_and_keeps_mode(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    atomic_files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_write_does_not_replace_device():
    atomic_files.write(os.devnull, "lost")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_write_takes_longest_file_name(tmp_path):
    atomic_files.write(tmp_path / ("x" * 255), b"data")


@pytest.mark.process
def test_lock_held_elsewhere_is_refused_without_wait(tmp_path, holder):
    refused = pytest.raises(BlockingIOError, match="another process")
    with refused, atomic_files.lock(tmp_path / ".lock", wait=False):
        pass
    holder.communicate()  # closes its input, which ends the process
    with atomic_files.lock(tmp_path / ".lock", wait=False):
        pass


@pytest.mark.process
def test_lock_of_killed_process_is_released(tmp_path, holder):
    holder.kill()
    holder.wait()
    with atomic_files.lock(tmp_path / ".lock", wait=False):
        pass


@pytest.mark.process
def test_lock_waits_for_holder(tmp_path, holder):
    waiter = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / ".lock"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    with waiter:
        assert waiter.stdout.readline() == b"started\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiter.wait(1.0)
        holder.kill()
        assert waiter.communicate(timeout=60)[0] == b"locked\n"
    assert waiter.returncode == 0


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_lock_without_support_of_file_system_is_given(tmp_path, monkeypatch, code):
    def flock(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with atomic_files.lock(tmp_path / ".lock"), atomic_files.lock(tmp_path / ".lock", wait=False):
        pass


def test_lock_on_folder_raises(tmp_path):
    with pytest.raises(IsADirectoryError), atomic_files.lock(tmp_path):
        pass
