"""Tests of resuming: killed, stopped and out-of-space runs end bit-identical to undisturbed ones.

They run the scripts in processes of their own, one and several.
"""

import json
import pathlib
import re
import signal
import time

import pytest
from helpers.command_line import ROOT, Script, free_port, settings
from helpers.tiny_training import SHAPE

pytestmark = [pytest.mark.process, pytest.mark.training]

CONFIGS = ROOT / "configs" / "experiments"
STEPS = 90
SHARED = {f"model.{key}": value for key, value in SHAPE.items()} | {
    "model.num_layers": 1, "length": 32, "batch": 4, "eval_every": 20, "eval_examples": 4,
    "log_every": 1, "optimization.warmup": 3, "compute.dtype": "float32",
}  # fmt: skip
TARGET = SHARED | {"steps": STEPS, "model.vocab_size": 320, "model.max_positions": 64}
# On corpus text and samples of the target, both with a cached target.
DRAFT = SHARED | {
    "steps": 8, "mixture.corpus": 0.5, "mixture.target": 0.5, "mixture.samples": 8,
    "mixture.batch": 4, "mixture.prompt_length": 8, "draft_eval.prompts": 2,
    "draft_eval.prompt_length": 8, "draft_eval.new_tokens": 8,
    "draft_eval.num_speculative_tokens": 1, "target_cache.store": "top_k",
}  # fmt: skip


def start(texts, workdir, *flags, name="target", devices=1, file_kib=None) -> Script:
    options = settings(DRAFT if name == "draft" else TARGET)
    options += [f"--workdir={workdir}", f"--config.data.train=('{texts}',)", *flags]
    options.insert(0, f"--config={CONFIGS}/pystdlib_{name}.py")
    return Script("train.py", *options, devices=devices, file_kib=file_kib)


def start_two(texts, workdir, *flags, name="target") -> list[Script]:
    """Starts two processes of four devices each."""
    mesh = "--config.mesh.data=2", "--config.mesh.model=4"
    together = (*mesh, *flags, f"--coordinator=localhost:{free_port()}", "--num_processes=2")
    return [
        start(texts, workdir, *together, f"--process_id={index}", name=name, devices=4)
        for index in range(2)
    ]


def when_logged(workdir, step, process) -> None:
    """Waits until the run has logged a step."""
    path = workdir / "log.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert process.poll() is None, process.wait()
        time.sleep(0.01)


def finished(process) -> str:
    done = process.wait(300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def result(workdir, step=STEPS):
    """Returns checksums of the last checkpoint, and the losses of every step."""
    note = json.loads((workdir / "checkpoints" / f"step_{step}" / "note" / "metadata").read_text())
    records = [json.loads(line) for line in (workdir / "log.jsonl").read_text().splitlines()]
    losses = [(row["step"], row["loss"]) for row in records if row["group"] == "train"]
    return note, losses


@pytest.fixture(scope="module")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """The folder of an undisturbed run."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    finished(start(texts, workdir))
    return workdir


@pytest.fixture(scope="module")
def uninterrupted(target):
    note, losses = result(target)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert note["iterator"] == {"next_index": STEPS} and len(note["checksums"]) > 10
    return note, losses


def assert_close(actual, expected) -> None:
    """Asserts that losses are equal up to rounding, which differs on another mesh."""
    for (step, loss), (_, other) in zip(actual[1], expected[1], strict=True):
        assert loss == pytest.approx(other, abs=2e-3), step


def test_killed_and_stopped_run_ends_bit_identical(texts, tmp_path, uninterrupted):
    """Also after a full disk, which ends a run with one line and leaves its checkpoints."""
    workdir = tmp_path / "run"
    process = start(texts, workdir)
    when_logged(workdir, 33, process)
    process.kill()
    process.wait()
    before = sorted(path.name for path in (workdir / "checkpoints").glob("step_*0"))
    done = start(texts, workdir, file_kib=20).wait(120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = f"error: {workdir}/checkpoints: expected to write a checkpoint, found "
    assert line in done.stderr.splitlines()[-1], done.stderr
    assert before == sorted(path.name for path in (workdir / "checkpoints").glob("step_*0"))
    process = start(texts, workdir)
    when_logged(workdir, 75, process)  # a full disk may have been noticed at step 60
    process.terminate()
    done = process.wait(120)
    assert done.returncode == 128 + signal.SIGTERM
    (step,) = re.findall(r"stopped at step (\d+), saved. Run the same command to", done.stderr)
    assert "Traceback" not in done.stderr and (workdir / "checkpoints" / f"step_{step}").is_dir()
    assert "model in" in finished(start(texts, workdir))
    assert result(workdir) == uninterrupted


def test_two_processes_resume_after_a_stop(texts, tmp_path, uninterrupted):
    workdir = tmp_path / "run"
    for step in (33, 55):
        processes = start_two(texts, workdir)
        when_logged(workdir, step, processes[0])
        processes[1].terminate()  # a signal to one process stops both
        for process in processes:
            done = process.wait(120)
            assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "model in" in finished(start(texts, workdir))
    assert_close(result(workdir), uninterrupted)


def test_two_processes_distil_like_one(texts, tmp_path, target):
    flag = f"--config.target={target / 'model'}"
    finished(start(texts, tmp_path / "one", flag, name="draft"))
    for process in start_two(texts, tmp_path / "two", flag, name="draft"):
        finished(process)
    one, two = (result(tmp_path / name, step=8) for name in ("one", "two"))
    assert len(one[1]) == 8
    assert_close(two, one)
    cached = [
        {path.relative_to(cache): path.stat().st_size for path in cache.glob("*/*.npy")}
        for cache in (tmp_path / "one" / "cache", tmp_path / "two" / "cache")
    ]
    # Three columns of samples, then ids and probabilities for each of the two tables.
    assert cached[0] == cached[1] and len(cached[0]) == 3 + 2 * 2
