"""Tests of several processes: the same tokens as one, and no survivors when one of them dies."""

import json
import time

import jax
import numpy as np
import pytest
from helpers.command_line import Script, free_port
from helpers.environment import ROOT
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

import spsjax
from spsjax import InputError
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import multihost, sharding

WORKER = ROOT / "tests" / "helpers" / "worker.py"
PROMPTS = ["import os\n", "def read(path):\n", "class Stack:\n", "for"]  # as in worker.py


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_tokenizer) -> list[str]:
    """Flags that name a target and a draft that a mesh of eight devices can split."""
    folder = tmp_path_factory.mktemp("pair")
    target = numpy_spread_model(320)
    models = {"target": target, "draft": numpy_nearby_model(target)}
    for name, model in models.items():
        hf_weights.save(folder / name, model.config, model.params, "float32")
        tiny_tokenizer.save(folder / name)
    return [f"--{name}={folder / name}" for name in models]


def start_two(*flags: str, second: str = "--seed=0") -> list[Script]:
    """Starts two processes, the second one with an additional flag."""
    flags = (*flags, f"--coordinator=localhost:{free_port()}", "--num_processes=2")
    return [
        Script(WORKER, *flags, f"--process_id={index}", *([second] * index), devices=4)
        for index in range(2)
    ]


def results(process: Script) -> list[dict]:
    done = process.wait()
    assert done.returncode == 0, done.stderr
    # Libraries must not write to standard output: every line is a result.
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.process
def test_two_processes_give_the_tokens_of_one_device(pair):
    """In a batch, with K chosen in every round, and by an engine whose requests process 0 takes."""
    target, draft = (spsjax.load(flag.partition("=")[2]) for flag in pair)
    first, second = start_two(*pair, "--more", "--data=2", "--model=4")
    batches, served = results(first)
    assert results(second) == []  # only the first process writes
    mixed = spsjax.SamplingParams(temperature=[0.0, 0.8, 0.8, 1.0], top_p=0.95)
    greedy = spsjax.SamplingParams(temperature=0.0)  # whose texts do not depend on K
    for tokens, (drafter, sampling) in zip(
        batches["tokens"], ((None, mixed), (draft, mixed), (None, greedy)), strict=True
    ):
        out = spsjax.generate(target, PROMPTS, drafter, None, sampling, [24, 24, 9, 24])
        assert tokens == [row.tolist() for row in out.tokens]
    assert served["cancelled"]
    sampling = spsjax.SamplingParams(temperature=0.8, top_p=0.95)
    for seed, (prompt, tokens) in enumerate(zip(PROMPTS, served["tokens"], strict=True)):
        out = spsjax.generate(target, [prompt], draft, 3, sampling, 16, seed)
        assert tokens == out.tokens[0].tolist()
    out = spsjax.generate(target, PROMPTS[:1] * 3, draft, 3, sampling, 16, 5)
    assert served["samples"] == [row.tolist() for row in out.tokens]
    # Each process loads only its own slices of the weights.
    mesh = sharding.mesh(2, 4)
    leaves = jax.tree.leaves(spsjax.load(pair[0].partition("=")[2], mesh).params)
    slices = [shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards]
    assert batches["held"] <= 1.01 * sum(slices) / 2


@pytest.mark.process
def test_mesh_without_the_devices_of_a_process_is_refused(pair):
    for process in start_two(*pair, "--data=1", "--model=4"):
        done = process.wait(300)
        assert done.returncode == 1
        assert "error: mesh: expected all 8 devices of 2 processes, found 1 x 4" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("second", ["--seed=2", "--stream"])
def test_processes_with_different_requests_are_refused(pair, second):
    """They would otherwise wait for each other forever."""
    for process in start_two(*pair, "--data=2", "--model=4", second=second):
        done = process.wait(300)
        assert done.returncode == 1
        assert "error: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.process
def test_process_without_a_coordinator_is_refused(pair):
    done = Script(WORKER, *pair, "--num_processes=2", devices=1).wait(300)
    assert done.returncode == 1
    assert "error: --num_processes: expected --coordinator with it, found none" in done.stderr


@pytest.mark.parametrize("address", ["nonsense", "localhost:abc", "localhost:0", ":80", "a:65536"])
def test_invalid_coordinator_address_is_refused(address):
    with pytest.raises(InputError, match=f"^coordinator: expected host:port.*, found '{address}'$"):
        multihost.initialize(address, 1, 0)


@pytest.mark.process
def test_killed_process_ends_the_others_within_a_minute(pair):
    runs = [start_two(*pair, "--data=2", "--model=4", "--rounds=100000") for _ in range(2)]
    for processes in runs:
        while "{" not in processes[0].read("stdout"):
            assert processes[0].poll() is None, processes[0].wait()
            time.sleep(0.01)
    start = time.monotonic()
    for victim, processes in enumerate(runs):
        processes[victim].kill()
    for victim, processes in enumerate(runs):
        done = processes[1 - victim].wait(120)
        assert time.monotonic() - start < 60
        assert done.returncode != 0
        messages = "a process of this run has ended or failed", "another task died"
        assert any(message in done.stderr for message in messages)


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("value", [True, False])
def test_all_true_needs_every_process(monkeypatch, value, others):
    """One process answers for itself; of several, each answers for all."""
    assert multihost.all_true(value) is value
    gather = lambda own: np.asarray([own, others])  # noqa: E731
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost.multihost_utils, "process_allgather", gather)
    assert multihost.all_true(value) is (value and others)


def test_broadcast_int_is_the_number_of_the_first_process(monkeypatch):
    assert multihost.broadcast_int(5) == 5
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gather = lambda own: np.asarray([[3], [own]])  # noqa: E731
    monkeypatch.setattr(multihost.multihost_utils, "process_allgather", gather)
    assert multihost.broadcast_int(5) == 3
