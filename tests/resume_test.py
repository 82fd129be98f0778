"""Runs that are killed, told to end, or fill the disk, and go on: to the bit what they would be.

By the scripts, in processes of their own, one and several.
"""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 90
FLAGS = (
    "--config.model.d_model=32", "--config.model.d_ff=32",
    "--config.model.num_heads=8", "--config.model.num_kv_heads=4", "--config.model.head_dim=4",
    "--config.model.num_layers=1", "--config.length=32", "--config.batch=4",
    "--config.eval_every=20", "--config.eval_examples=4", "--config.log_every=1",
    "--config.optimization.warmup=3", "--config.compute.dtype=float32",
)  # fmt: skip
TARGET = (
    *FLAGS, f"--config.steps={STEPS}", "--config.model.vocab_size=320",
    "--config.model.max_positions=64",
)  # fmt: skip
# From what is kept of the target, on its own texts and on the corpus.
DRAFT = (
    *FLAGS, "--config.steps=8", "--config.mixture.corpus=0.5", "--config.mixture.target=0.5",
    "--config.mixture.samples=8", "--config.mixture.batch=4", "--config.mixture.prompt_length=8",
    "--config.trial.prompts=2", "--config.trial.prompt_length=8", "--config.trial.new_tokens=8",
    "--config.teacher.keep=top_k",
)  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """A folder of 30 texts."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(30):
        lines = "".join(f"    x = x * {line} + {index}\n" for line in range(9))
        (folder / f"{index}.txt").write_text(f"def function_{index}(x):\n{lines}")
    return str(folder)


def start(
    texts, workdir, *flags, script="train_target.py", devices=1, limit=None
) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    of_script = DRAFT if script == "train_drafter.py" else TARGET
    train = f"--config.data.train=('{texts}',)"
    limited = ["bash", "-c", f'ulimit -f {limit}; exec "$0" "$@"'] if limit else []
    return subprocess.Popen(
        [
            *limited, sys.executable, ROOT / "scripts" / script, f"--workdir={workdir}", train,
            *of_script, *flags,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=environment, cwd=ROOT,
    )  # fmt: skip


def start_two(texts, workdir, *flags, script="train_target.py") -> list[subprocess.Popen]:
    """Two processes of four devices each."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    mesh = "--config.mesh.data=2", "--config.mesh.model=4"
    together = (*mesh, *flags, f"--coordinator=localhost:{port}", "--num_processes=2")
    return [
        start(texts, workdir, *together, f"--process_id={index}", script=script, devices=4)
        for index in range(2)
    ]


def when_logged(workdir, step, process) -> None:
    """Waits until the run has logged a step."""
    path = workdir / "log.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def finished(process) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out + err


def result(workdir, step=STEPS):
    """Sums of the last checkpoint's bits, and the losses of every step."""
    note = json.loads((workdir / "checkpoints" / f"step_{step}" / "note" / "metadata").read_text())
    records = [json.loads(line) for line in (workdir / "log.jsonl").read_text().splitlines()]
    losses = [(each["step"], each["loss"]) for each in records if each["group"] == "train"]
    return note, losses


@pytest.fixture(scope="module")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """A run that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    finished(start(texts, workdir))
    return workdir


@pytest.fixture(scope="module")
def uninterrupted(target):
    """What a run is that nobody disturbs."""
    note, losses = result(target)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert note["feed"] == {"next_index": STEPS} and len(note["sums"]) > 10
    return note, losses


def assert_near(found, expected) -> None:
    """Another mesh rounds otherwise; nothing else differs."""
    for (step, loss), (_, other) in zip(found[1], expected[1]):
        assert loss == pytest.approx(other, abs=2e-3), step


def test_killed_and_told_to_end_a_run_is_the_same_to_the_bit(texts, tmp_path, uninterrupted):
    workdir = tmp_path / "run"
    process = start(texts, workdir)
    when_logged(workdir, 33, process)
    process.kill()
    process.communicate()
    process = start(texts, workdir)
    when_logged(workdir, 55, process)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    (step,) = re.findall(r"stopped at step (\d+), saved; the same command goes on from it", err)
    assert "Traceback" not in err and (workdir / "checkpoints" / f"step_{step}").is_dir()
    assert "model in" in finished(start(texts, workdir))
    assert result(workdir) == uninterrupted


def test_two_processes_killed_and_told_to_end_go_on(texts, tmp_path, uninterrupted):
    workdir = tmp_path / "run"
    processes = start_two(texts, workdir)
    when_logged(workdir, 33, processes[0])
    for process in processes:  # that one alone takes the other along: distributed_test
        process.kill()
    for process in processes:
        process.communicate(timeout=120)
    processes = start_two(texts, workdir)
    when_logged(workdir, 55, processes[0])
    processes[1].terminate()  # one of them is told, and all of them hear of it
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM, err
    for process in start_two(texts, workdir):
        finished(process)
    assert_near(result(workdir), uninterrupted)
    # And another mesh can go on with it, or find it finished.
    assert "model in" in finished(start(texts, workdir))


def test_two_processes_distil_as_one_does(texts, tmp_path, target):
    teaching = f"--config.target={target / 'model'}"
    finished(start(texts, tmp_path / "one", teaching, script="train_drafter.py"))
    for process in start_two(texts, tmp_path / "two", teaching, script="train_drafter.py"):
        finished(process)
    one, two = (result(tmp_path / name, step=8) for name in ("one", "two"))
    assert len(one[1]) == 8
    assert_near(two, one)
    kept = [
        {path.relative_to(cache): path.stat().st_size for path in cache.glob("*/*.npy")}
        for cache in (tmp_path / "one" / "cache", tmp_path / "two" / "cache")
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 3 + 2 * 2  # of two tables, ids and laws


def test_a_full_disk_ends_a_run_with_one_line_and_leaves_the_checkpoints(
    texts, tmp_path, uninterrupted
):
    workdir = tmp_path / "run"
    process = start(texts, workdir)
    when_logged(workdir, 45, process)
    process.kill()
    process.communicate()
    before = sorted(path.name for path in (workdir / "checkpoints").glob("step_*0"))
    process = start(texts, workdir, limit=20)  # KiB that a file may have
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    line = err.splitlines()[-1]
    assert f"error: {workdir}/checkpoints: expected to write a checkpoint, found " in line, err
    assert "Traceback" not in err
    assert sorted(path.name for path in (workdir / "checkpoints").glob("step_*0")) == before
    # Space was made, and another mesh goes on.
    mesh = ("--config.mesh.data=2", "--config.mesh.model=4")
    assert "model in" in finished(start(texts, workdir, *mesh, devices=8))
    assert_near(result(workdir), uninterrupted)
