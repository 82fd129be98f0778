"""Tests of checkpoints: complete or absent, and read as written or not at all."""

import errno
import functools
import json
import resource
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
from helpers.toy_language import CONFIG

from spsjax import InputError
from spsjax.parallel import multihost, sharding
from spsjax.training import step as train_step
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.optimizer import OptimizerConfig
from spsjax.utils.hashing import array_checksums

OPTIMIZER = OptimizerConfig(1e-2, steps=20, warmup=2)


def drawn(shapes, seed):
    """Returns arrays of random numbers, which nothing has to compile."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        numbers = rng.integers(0, 1000, leaf.shape).astype(leaf.dtype)
        return jax.device_put(numbers, leaf.sharding)

    return jax.tree.map(draw, shapes)


@functools.cache
def training_state(seed=0, mesh=None):
    param_shapes = train_step.model_shapes(CONFIG, mesh)
    return drawn(train_step.state_shapes(param_shapes, OPTIMIZER), seed)


@functools.cache
def state(seed=0):
    """Returns a state of one array: what a checkpoint costs grows with their number."""
    kernel = jax.ShapeDtypeStruct((64, 32), np.float32, sharding=sharding.batch_sharding(None))
    return drawn({"kernel": kernel}, seed)


def write(folder, scores, state=state, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step, score in enumerate(scores, 1):
            checkpoints.save(step, state(step), {"next_index": step}, score)
    return folder


def read(folder):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(state(99))


def assert_restored(restored, step, state=state):
    assert restored[0] == step and restored[2] == {"next_index": step}
    assert jax.tree.structure(restored[1]) == jax.tree.structure(state(step))
    assert all(map(np.array_equal, jax.tree.leaves(restored[1]), jax.tree.leaves(state(step))))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("run") / "checkpoints", [0.1, 0.2, 0.3], keep=3)


@pytest.fixture
def copy(written, tmp_path):
    """A copy of that folder, to damage."""
    return shutil.copytree(written, tmp_path / "checkpoints")


def test_newest_checkpoint_is_restored_on_any_mesh(tmp_path):
    folder = write(tmp_path / "checkpoints", [0.1, 0.2], training_state)
    with Checkpoints(folder) as checkpoints:
        for mesh in (None, sharding.mesh(2, 4)):
            wanted = training_state(99, mesh)
            restored = checkpoints.restore(wanted)
            assert_restored(restored, 2, training_state)
            for left, right in zip(jax.tree.leaves(restored[1]), jax.tree.leaves(wanted)):
                assert left.sharding.is_equivalent_to(right.sharding, left.ndim)


def test_newest_and_best_checkpoints_are_kept(tmp_path):
    assert read(tmp_path / "none") is None
    folder = write(tmp_path / "a", [0.1, 0.9, 0.3, 0.8, 0.2], keep=2, keep_best=1)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [2, 4, 5] and checkpoints.best() == 2
    folder = write(tmp_path / "b", [-1.0, -3.0, -2.0, -np.inf], keep=1, keep_best=2)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [1, 3, 4] and checkpoints.best() == 1
    assert [path.name for path in sorted(folder.iterdir())] == ["step_1", "step_3", "step_4"]


def flip_a_bit(folder):
    files = (path for path in (folder / "state").rglob("*") if path.is_file())
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def empty_all_files(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def change_note(folder, change):
    path = folder / "note" / "metadata"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def replace_note(folder):
    change_note(folder, lambda note: {"iterator": {"next_index": 3}, "checksums": [1, 2]})


def advance_iterator(folder):
    change_note(folder, lambda note: note | {"iterator": {"next_index": 4}})


@pytest.mark.parametrize("damage", [flip_a_bit, empty_all_files, replace_note, advance_iterator])
def test_damaged_newest_checkpoint_is_moved_away(copy, damage, capfd):
    """It is named in a warning, the one before is restored, and its step is saved again."""
    damage(copy / "step_3")
    warning = rf"^{copy}/step_3: expected a checkpoint, found it dam"
    with Checkpoints(copy, keep=3) as checkpoints:
        with pytest.warns(UserWarning, match=warning):
            assert_restored(checkpoints.restore(state(99)), 2)
        assert (copy.parent / "damaged" / "step_3").is_dir()
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, state(3), {"next_index": 3})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3]
        assert_restored(checkpoints.restore(state(99)), 3)
    assert "Traceback" not in capfd.readouterr().err


def test_checkpoint_that_another_process_cannot_read_is_damaged(copy, monkeypatch):
    """All processes restore the newest checkpoint that every one of them can read."""
    asked = []

    def all_true(value):  # the other process cannot read the first one
        asked.append(value)
        return value and len(asked) > 1

    monkeypatch.setattr(multihost, "all_true", all_true)
    with pytest.warns(UserWarning, match=r"step_3: .* \(another process could not read it\)"):
        assert_restored(read(copy), 2)
    assert asked == [True, True] and (copy.parent / "damaged" / "step_3").is_dir()


def test_half_deleted_old_checkpoint_is_removed_silently(copy, recwarn):
    """A run may be killed while Orbax deletes an old checkpoint. That is no damage to report."""
    for path in (copy / "step_2").iterdir():
        if path.name != "state":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert_restored(read(copy), 3)
    assert not (copy / "step_2").exists() and not (copy.parent / "damaged").exists()
    assert not [warning for warning in recwarn if "damaged" in str(warning.message)]


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("damage", [flip_a_bit, empty_all_files])
def test_all_checkpoints_damaged_raises_and_moves_nothing(copy, damage):
    for step in (1, 2, 3):
        damage(copy / f"step_{step}")
    before = names(copy.parent)
    message = rf"^{copy}: expected an undamaged checkpoint, found only damaged"
    for _ in range(2):  # a scheduler tries again
        with pytest.raises(InputError, match=message):
            read(copy)
        assert names(copy.parent) == before


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        ValueError("Error opening kvstore [OS error 24: EMFILE Too many open files]"),
        MemoryError("no room"),
    ],
)
def test_system_error_is_not_taken_for_damage(copy, error, monkeypatch):
    before = names(copy.parent)
    message = r"step_3: expected to read it, found .*(open|no r)"
    with Checkpoints(copy) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "_read", mock.Mock(side_effect=error))
            with pytest.raises(InputError, match=message):
                checkpoints.restore(state(99))
        assert names(copy.parent) == before
        assert_restored(checkpoints.restore(state(99)), 3)


def test_full_disk_is_one_line_and_keeps_older_checkpoints(copy):
    """A file size limit stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with Checkpoints(copy) as checkpoints, pytest.raises(InputError) as caught:
            checkpoints.save(4, state(4), {"next_index": 4})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = str(caught.value)
    assert message.startswith(f"{copy}: expected to write a checkpoint, found ")
    assert "complete checkpoints: 1, 2, 3)" in message
    assert "\n" not in message and len(message) < 700
    assert_restored(read(copy), 3)


def test_checksums_see_bits_and_order_but_no_sharding():
    table, numbers = np.arange(64, dtype=np.float32).reshape(8, 8), np.arange(8, dtype=np.int32)
    leaves = jax.device_put({"a": table, "b": numbers})
    expected = array_checksums(leaves)
    mesh = sharding.mesh(2, 4)
    for spec in (("data", "model"), ("model", None), (None, "data")):
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        assert array_checksums({**leaves, "a": jax.device_put(table, split)}) == expected
    changed = table.copy()
    changed[3, 4] = np.nextafter(changed[3, 4], np.float32(np.inf))
    for other in (changed, table[::-1], table.T, -table):
        assert array_checksums({**leaves, "a": jax.device_put(other)}) != expected


@pytest.mark.parametrize(("keep", "keep_best"), [(1.5, 1), (1, -1)])
def test_invalid_number_to_keep_is_refused(tmp_path, keep, keep_best):
    with pytest.raises(InputError, match=r"^keep(_best)?: expected an integer >= "):
        Checkpoints(tmp_path, keep, keep_best)


def test_first_of_two_errors_is_reported(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="the first"), Checkpoints(tmp_path, 1, 1) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "close", lambda: 1 / 0)
        raise OSError("the first")
