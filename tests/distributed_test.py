"""Tests of several processes: the same tokens as one, and no survivors when one of them dies."""

import json
import pathlib
import time

import pytest
from command_line import Script, free_port

from spsjax import InputError
from spsjax.parallel import multihost

WORKER = pathlib.Path(__file__).parent / "worker.py"


def start(*flags: str, devices: int) -> Script:
    return Script(WORKER, *flags, devices=devices)


def start_two(*flags: str, second: str = "--seed=0") -> list[Script]:
    """Starts two processes, the second one with an additional flag."""
    flags = (*flags, f"--coordinator=localhost:{free_port()}", "--num_processes=2")
    return [
        start(*flags, f"--process_id={index}", *([second] * index), devices=4) for index in range(2)
    ]


def results(process: Script) -> list[dict]:
    done = process.wait()
    assert done.returncode == 0, done.stderr
    # Libraries must not write to standard output: every line is a result.
    return [json.loads(line) for line in done.stdout.splitlines()]


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
        done = process.wait(300)
        assert done.returncode == 1
        assert "error: mesh: expected all 8 devices of 2 processes, found 1 x 4" in done.stderr


@pytest.mark.parametrize("second", ["--seed=2", "--stream"])
def test_processes_with_different_requests_are_refused(second):
    """They would otherwise wait for each other forever."""
    for process in start_two("--data=2", "--model=4", second=second):
        done = process.wait(300)
        assert done.returncode == 1
        assert "error: " in done.stderr and "Traceback" not in done.stderr


def test_process_without_a_coordinator_is_refused():
    done = start("--num_processes=2", devices=1).wait(300)
    assert done.returncode == 1
    assert "error: --num_processes: expected --coordinator with it, found none" in done.stderr


@pytest.mark.parametrize("address", ["nonsense", "localhost:abc", "localhost:0", ":80", "a:65536"])
def test_invalid_coordinator_address_is_refused(address):
    with pytest.raises(InputError, match=f"^coordinator: expected host:port.*, found '{address}'$"):
        multihost.initialize(address, 1, 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_ends_the_others_within_a_minute(victim):
    processes = start_two("--data=2", "--model=4", "--rounds=100000")
    while "{" not in processes[0].read("stdout"):
        assert processes[0].poll() is None, processes[0].wait()
        time.sleep(0.01)
    processes[victim].kill()
    start = time.monotonic()
    done = processes[1 - victim].wait(120)
    assert time.monotonic() - start < 60
    assert done.returncode != 0
    messages = "a process of this run has ended or failed", "another task died"
    assert any(message in done.stderr for message in messages)
