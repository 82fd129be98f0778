"""Two processes of four devices give what one of eight gives; none outlives another for long."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from spsjax import InputError
from spsjax.parallel import multihost

ROOT = pathlib.Path(__file__).parent.parent


def start(*flags: str, devices: int) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "worker.py", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        cwd=ROOT,
    )


def start_two(*flags: str, second: str = "--seed=0") -> list[subprocess.Popen]:
    """Two processes; the second has a flag of its own, too."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    together = (*flags, f"--coordinator=localhost:{port}", "--num_processes=2")
    return [
        start(*together, f"--process_id={index}", *([second] * index), devices=4)
        for index in range(2)
    ]


def ended(process: subprocess.Popen) -> list[dict]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]  # and nothing else, of no library


@pytest.fixture(scope="module")
def one_device() -> dict:
    """The tokens of one device."""
    (result,) = ended(start(devices=1))
    assert [len(rows) for rows in result["tokens"]] == [4, 4]
    return result


def test_two_processes_give_the_tokens_of_one_and_of_one_device(one_device):
    flags = ("--data=2", "--model=4")
    (whole,) = ended(start(*flags, devices=8))
    first, second = start_two(*flags)
    (result,) = ended(first)
    assert ended(second) == []  # only the first process writes
    assert result["tokens"] == whole["tokens"] == one_device["tokens"]
    # Each process loads its slices alone.
    assert result["held"] <= 1.01 * whole["held"] / 2


def test_a_mesh_that_leaves_out_another_process_s_devices_is_refused():
    for process in start_two("--data=1", "--model=4"):
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "error: mesh: expected all 8 devices of 2 processes, found 1 x 4" in err


@pytest.mark.parametrize("second", ["--seed=2", "--stream"])
def test_processes_that_are_asked_different_things_say_so_rather_than_wait(second):
    for process in start_two("--data=2", "--model=4", second=second):
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "error: " in err and "Traceback" not in err


def test_one_of_several_processes_alone_is_refused():
    process = start("--num_processes=2", devices=1)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "error: --num_processes: expected --coordinator with it, found none" in err


@pytest.mark.parametrize("address", ["nonsense", "localhost:abc", "localhost:0", ":80", "a:65536"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InputError, match=f"^coordinator: expected host:port.*, found '{address}'$"):
        multihost.initialize(address, 1, 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_takes_the_others_along_within_a_minute(victim):
    processes = start_two("--data=2", "--model=4", "--rounds=100000")
    while not (line := processes[0].stdout.readline()).startswith("{"):
        assert line
    processes[victim].kill()
    start, survivor = time.monotonic(), processes[1 - victim]
    _, err = survivor.communicate(timeout=120)
    assert time.monotonic() - start < 60
    assert survivor.returncode not in (0, None)
    assert "a process of this run has ended or failed" in err or "another task died" in err
