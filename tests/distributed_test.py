"""Tests of several processes: the same tokens as one, and no survivors when one of them dies."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
from conftest import CHILD_FLAGS

from spsjax import InputError
from spsjax.parallel import multihost

ROOT = pathlib.Path(__file__).parent.parent


def start(*flags: str, devices: int) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{CHILD_FLAGS} --xla_force_host_platform_device_count={devices}",
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
    """Starts two processes, the second one with an additional flag."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    flags = (*flags, f"--coordinator=localhost:{port}", "--num_processes=2")
    return [
        start(*flags, f"--process_id={index}", *([second] * index), devices=4) for index in range(2)
    ]


def results(process: subprocess.Popen) -> list[dict]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    # Libraries must not write to standard output: every line is a result.
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def one_device() -> dict:
    """The tokens of one device."""
    (result,) = results(start(devices=1))
    assert [len(rows) for rows in result["tokens"]] == [4, 4]
    return result


def test_two_processes_give_the_tokens_of_one_device(one_device):
    flags = ("--data=2", "--model=4")
    (one_process,) = results(start(*flags, devices=8))
    first, second = start_two(*flags)
    (result,) = results(first)
    assert results(second) == []  # only the first process writes
    assert result["tokens"] == one_process["tokens"] == one_device["tokens"]
    # Each process loads only its own slices of the weights.
    assert result["held"] <= 1.01 * one_process["held"] / 2


def test_mesh_without_the_devices_of_a_process_is_refused():
    for process in start_two("--data=1", "--model=4"):
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "error: mesh: expected all 8 devices of 2 processes, found 1 x 4" in err


@pytest.mark.parametrize("second", ["--seed=2", "--stream"])
def test_processes_with_different_requests_are_refused(second):
    """They would otherwise wait for each other forever."""
    for process in start_two("--data=2", "--model=4", second=second):
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "error: " in err and "Traceback" not in err


def test_process_without_a_coordinator_is_refused():
    process = start("--num_processes=2", devices=1)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "error: --num_processes: expected --coordinator with it, found none" in err


@pytest.mark.parametrize("address", ["nonsense", "localhost:abc", "localhost:0", ":80", "a:65536"])
def test_invalid_coordinator_address_is_refused(address):
    with pytest.raises(InputError, match=f"^coordinator: expected host:port.*, found '{address}'$"):
        multihost.initialize(address, 1, 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_ends_the_others_within_a_minute(victim):
    processes = start_two("--data=2", "--model=4", "--rounds=100000")
    while not (line := processes[0].stdout.readline()).startswith("{"):
        assert line
    processes[victim].kill()
    start, survivor = time.monotonic(), processes[1 - victim]
    _, err = survivor.communicate(timeout=120)
    assert time.monotonic() - start < 60
    assert survivor.returncode not in (0, None)
    assert "a process of this run has ended or failed" in err or "another task died" in err
