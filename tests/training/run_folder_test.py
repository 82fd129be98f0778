"""Tests of the run folder: its config, log, TensorBoard events and lock."""

import json
import subprocess
import sys
from unittest import mock

import pytest
from helpers.environment import ROOT
from ml_collections import ConfigDict
from tensorboardX.proto import event_pb2

from spsjax import InputError, NonFiniteError
from spsjax.parallel import multihost
from spsjax.training import plots, run_folder


def config(**changes):
    return ConfigDict({"seed": 0, "model": {"d_model": 8}, "keep": 2} | changes)


def events(path):
    """The events of one file, each preceded by its length and a checksum, and followed by one."""
    content, parsed = path.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        parsed.append(event_pb2.Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    return parsed


def curve_points(folder):
    """The points that TensorBoard shows: (name, step) -> value.

    A file that begins with a session start hides points of earlier files from that step on.
    """
    points = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime):
        for event in events(path):
            if event.session_log.status == event_pb2.SessionLog.START:
                points = {key: y for key, y in points.items() if key[1] < event.step}
            for value in event.summary.value:
                points[value.tag, event.step] = value.simple_value
    return points


def logged(folder, steps, loss):
    for step in steps:
        folder.log(step, "train", loss=loss * step)


def test_log_resumes_after_a_torn_line(tmp_path):
    """Damaged lines and records beyond the resumed step are dropped."""
    folder = run_folder.Folder(tmp_path, config())
    folder.begin(0)
    logged(folder, (1, 2, 3), 1.0)
    path = tmp_path / "log.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "3", '{"a": 1}', *lines[1:], '{"step": 4, "gro']))
    folder.begin(2)
    folder.log(3, "train", loss=0.5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [
        (1, 1.0),
        (2, 2.0),
        (3, 0.5),
    ]


NO_RECORDS = [
    *(b"", b"\xff", b"3", b"[" * 100_000, b'{"step": 1, "group": []}'),
    *(
        b'{"step": 1, "group": "a", "loss": %s}' % loss
        for loss in (b"null", b'"x"', b"NaN", b"1e308")
    ),
    b'{"step": 1, "group": "a", "loss": {"mean": 1}}',
    b'{"step": 1, "group": "a", "loss": {"mean": "a", "interval": null}}',
    b'{"step": 1, "group": "a", "loss": {"mean": 1, "interval": -1}}',
    b'{"step": 1%s, "group": "a", "loss": 1}' % (b"0" * 400),
]


@pytest.mark.parametrize("log", [None, *NO_RECORDS])
def test_curves_of_a_damaged_log_are_not_drawn(tmp_path, log):
    """The run has ended well, so that its results are shown without curves."""
    pytest.importorskip("matplotlib")
    if log is not None:
        (tmp_path / "log.jsonl").write_bytes(log)
    assert plots.plot_curves(tmp_path) == f"{tmp_path / 'log.jsonl'} has no measurements"
    assert not (tmp_path / "curves.png").exists()


def test_curves_leave_out_damaged_lines(tmp_path):
    """Sound lines are drawn, of whatever size, and numbers beside metric summaries."""
    pytest.importorskip("matplotlib")
    folder = run_folder.Folder(tmp_path, config())
    folder.begin(0)
    logged(folder, (1, 2), 1.6e38)
    folder.log(3, "train", loss={"mean": -3.3e38, "interval": 0.5, "by_position": [2.0]})
    with open(tmp_path / "log.jsonl", "ab") as file:
        file.write(b"\n".join(NO_RECORDS))
    assert [record["step"] for record in run_folder.read_log(tmp_path)] == [1, 2, 3]
    assert plots.plot_curves(tmp_path) == ""
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_depths_of_several_runs_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {name: tmp_path / name for name in ("deep", "model", "new")}
    columns = {"deep": ("acceptance", "acceptance_2"), "model": ("acceptance",), "new": ("loss",)}
    for name, folder in runs.items():
        run = run_folder.Folder(folder, config())
        run.begin(0)
        run.log(1, "held_out", **{key: {"mean": 0.5, "interval": 0.1} for key in columns[name]})
    assert plots._acceptance_by_depth(runs["deep"]) == ([0.5, 0.5], [0.1, 0.1])
    with pytest.raises(InputError, match="new: expected the folder of a drafter's training"):
        plots.plot_depths(runs, tmp_path / "depths.png")
    del runs["new"]
    plots.plot_depths(runs, tmp_path / "depths.png")
    assert (tmp_path / "depths.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_hides_points_after_the_resumed_step(tmp_path):
    folder = run_folder.Folder(tmp_path, config())
    folder.begin(0)
    logged(folder, (1, 2, 3, 4), 1.0)
    # The folder is not closed: a killed process does not close it either.
    resumed = run_folder.Folder(tmp_path, config())
    resumed.begin(2)
    logged(resumed, (5,), 1.0)
    assert curve_points(tmp_path) == {("train/loss", step): step for step in (1, 2, 5)}


def test_tensorboard_curve_of_a_summary_is_its_mean(tmp_path):
    folder = run_folder.Folder(tmp_path, config())
    folder.begin(0)
    folder.log(5, "held_out", loss={"mean": 2.0, "interval": None, "by_position": [2.0]})
    assert curve_points(tmp_path) == {("held_out/loss", 5): 2.0}


def test_log_refuses_a_value_that_is_not_finite(tmp_path):
    folder = run_folder.Folder(tmp_path, config())
    folder.begin(0)
    with pytest.raises(NonFiniteError, match=r"^step 1: expected finite metrics of train, found"):
        folder.log(1, "train", loss=float("nan"))
    assert (tmp_path / "log.jsonl").read_text() == ""


@pytest.mark.parametrize("changes", [{"seed": 1}, {"model": {"d_model": 9}}, {"seed": True}])
def test_run_with_another_config_is_refused(tmp_path, changes):
    run_folder.Folder(tmp_path, config()).begin(0)
    with pytest.raises(InputError, match=rf"^{tmp_path}: expected the stored config of the run to"):
        run_folder.Folder(tmp_path, config(**changes))


def test_free_keys_may_change_when_a_run_is_resumed(tmp_path):
    run_folder.Folder(tmp_path, config()).begin(0)
    assert run_folder.Folder(tmp_path, config(keep=5), ("keep",)).resumable
    with pytest.raises(InputError, match=r"keep=2, found 5\."):
        run_folder.Folder(tmp_path, config(keep=5))


def test_pinned_facts_may_not_change(tmp_path):
    folder = run_folder.Folder(tmp_path, config())
    folder.pin(target="abc")
    folder.begin(0)
    resumed = run_folder.Folder(tmp_path, config())
    resumed.pin(target="abc")
    with pytest.raises(InputError, match=r"pinned\.target='abc', found 'def'\."):
        resumed.pin(target="def")


def test_folder_locked_by_another_run_is_refused(tmp_path):
    """The run that holds the lock may take it again."""
    folder = run_folder.Folder(tmp_path, config())
    for _ in range(2):
        folder.lock()
    with (
        mock.patch.object(multihost, "_LOCKED", {}),  # as another process has it
        pytest.raises(InputError, match="in use by another process"),
    ):
        folder.lock()


@pytest.mark.process
def test_folder_locked_by_another_process_is_refused(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import ml_collections, spsjax.training.run_folder as run_folder\n"
        "run_folder.Folder(sys.argv[2], ml_collections.ConfigDict()).lock()\n"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path)]
    run_folder.Folder(tmp_path, ConfigDict()).lock()
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert "in use by another process" in result.stderr
