"""Tests of the run folder: its config, log, TensorBoard events and lock."""

import json
from unittest import mock

import pytest
from tensorboardX.proto import event_pb2

from spsjax import InputError, NonFiniteError
from spsjax.parallel import multihost
from spsjax.training import plots, run_folder


def config(**changes):
    return {"seed": 0, "model": {"d_model": 8}, "keep": 2} | changes


def begun(path, step=0) -> run_folder.Folder:
    folder = run_folder.Folder(path, config())
    folder.begin(step)
    return folder


def events(path):
    """The events of one file, each preceded by its length and a checksum, and followed by one."""
    content, parsed = path.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        parsed.append(event_pb2.Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    return parsed


def curve_points(folder):
    """Returns the points that TensorBoard shows: (name, step) -> value.

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
    folder = begun(tmp_path)
    logged(folder, (1, 2, 3), 1.0)
    path = tmp_path / "log.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "3", '{"a": 1}', *lines[1:], '{"step": 4, "gro']))
    folder.begin(2)
    folder.log(3, "train", loss=0.5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in records] == [(1, 1.0), (2, 2.0), (3, 0.5)]


RECORD = b'{"step": 1, "group": "a", "loss": %s}'
NO_RECORDS = [
    *(b"", b"\xff", b"3", b"[" * 100_000, b'{"step": 1, "group": []}'),
    *(RECORD % loss for loss in (b"null", b'"x"', b"NaN", b"1e308", b'{"mean": 1}')),
    RECORD % b'{"mean": "a", "interval": null}',
    RECORD % b'{"mean": 1, "interval": -1}',
    RECORD.replace(b"1", b"1" + b"0" * 400) % b"1",
]


@pytest.mark.parametrize("log", [None, *NO_RECORDS])
def test_curves_of_a_damaged_log_are_not_drawn(tmp_path, log):
    pytest.importorskip("matplotlib")
    if log is not None:
        (tmp_path / "log.jsonl").write_bytes(log)
    assert plots.plot_curves(tmp_path) == f"{tmp_path / 'log.jsonl'} has no measurements"
    assert not (tmp_path / "curves.png").exists()


def test_curves_leave_out_damaged_lines(tmp_path):
    pytest.importorskip("matplotlib")
    folder = begun(tmp_path)
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
        columns_of = {key: {"mean": 0.5, "interval": 0.1} for key in columns[name]}
        begun(folder).log(1, "held_out", **columns_of)
    assert plots._acceptance_by_depth(runs["deep"]) == ([0.5, 0.5], [0.1, 0.1])
    with pytest.raises(InputError, match="new: expected the folder of a drafter's training"):
        plots.plot_depths(runs, tmp_path / "depths.png")
    del runs["new"]
    plots.plot_depths(runs, tmp_path / "depths.png")
    assert (tmp_path / "depths.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_hides_points_after_the_resumed_step(tmp_path):
    """The curve of a summary is its mean. A killed process does not close its folder."""
    folder = begun(tmp_path)
    logged(folder, (1, 2, 3, 4), 1.0)
    folder.log(1, "held_out", loss={"mean": 2.0, "interval": None, "by_position": [2.0]})
    logged(begun(tmp_path, 2), (5,), 1.0)
    expected = {("train/loss", step): step for step in (1, 2, 5)}
    assert curve_points(tmp_path) == expected | {("held_out/loss", 1): 2.0}


def test_log_refuses_a_value_that_is_not_finite(tmp_path):
    folder = begun(tmp_path)
    with pytest.raises(NonFiniteError, match=r"^step 1: expected finite metrics of train, found"):
        folder.log(1, "train", loss=float("nan"))
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_run_with_another_config_is_refused(tmp_path):
    begun(tmp_path)
    for changes in ({"seed": 1}, {"model": {"d_model": 9}}, {"seed": True}):
        with pytest.raises(InputError, match=rf"^{tmp_path}: expected the stored config of the ru"):
            run_folder.Folder(tmp_path, config(**changes))
    assert run_folder.Folder(tmp_path, config(keep=5), ("keep",)).resumable  # a free key
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
