"""Tests of cached columns: computed once, resumable, and safe on a full disk."""

import errno
import resource
import threading

import numpy as np
import pytest

from spsjax import InputError
from spsjax.data import column_store

COUNT, BATCH = 11, 3
SQUARES = np.arange(COUNT)[:, None] * np.arange(2) ** 2
LABELS = np.arange(COUNT, dtype=np.int8)


class Compute:
    """A compute function that records its calls and is interrupted at the row `fails_at`."""

    def __init__(self, fails_at=None):
        self.starts, self.fails_at = [], fails_at

    def __call__(self, start):
        if start == self.fails_at:
            raise KeyboardInterrupt
        self.starts.append(start)
        rows = np.minimum(np.arange(start, start + BATCH), COUNT - 1)  # the last batch is padded
        return {"squares": SQUARES[rows], "labels": LABELS[rows]}


def assert_complete(columns):
    assert sorted(columns) == ["labels", "squares"]
    for column, expected in ((columns["squares"], SQUARES), (columns["labels"], LABELS)):
        assert column.dtype == expected.dtype
        np.testing.assert_array_equal(column, expected)


@pytest.fixture(autouse=True)
def save_every_batch(monkeypatch):
    monkeypatch.setattr(column_store, "_SAVE_SECONDS", 0)


def cached_columns(folder, compute):
    return column_store.cached_columns(folder / "it", COUNT, BATCH, compute, "it")


def interrupt(folder, fails_at):
    with pytest.raises(KeyboardInterrupt):
        cached_columns(folder, Compute(fails_at))


def test_cached_columns_are_computed_once(tmp_path):
    compute = Compute()
    for _ in range(2):
        assert_complete(cached_columns(tmp_path, compute))
    assert compute.starts == [0, 3, 6, 9]


@pytest.mark.parametrize("fails_at", [0, 6])
def test_interrupted_computation_resumes_at_the_batch(tmp_path, fails_at):
    interrupt(tmp_path, fails_at)
    assert not (tmp_path / "it").exists()
    # A killed process may have written rows that its counter does not include.
    for path in tmp_path.glob(".it.partial/*.npy"):
        np.load(path, mmap_mode="r+")[fails_at:] = 77
    compute = Compute()
    assert_complete(cached_columns(tmp_path, compute))
    assert compute.starts == list(range(fails_at, COUNT, BATCH))
    cached_columns(tmp_path / "undisturbed", Compute())
    assert {path.name for path in (tmp_path / "it").iterdir()} == {"labels.npy", "squares.npy"}
    for path in (tmp_path / "it").iterdir():
        assert path.read_bytes() == (tmp_path / "undisturbed" / "it" / path.name).read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.unlink(),
        lambda path: np.save(path, SQUARES.astype(np.float32)),
    ],
)
def test_resume_from_damaged_rows_is_refused(tmp_path, damage):
    """The refusal leaves the file as it is, so that the next attempt is refused, too."""
    interrupt(tmp_path, 6)
    path = tmp_path / ".it.partial" / "squares.npy"
    damage(path)
    for _ in range(2):
        message = rf"^{path}: expected 6 saved rows of 11, .*Delete {path.parent} to"
        with pytest.raises(InputError, match=message):
            cached_columns(tmp_path, Compute())
    (tmp_path / "it").mkdir()
    with pytest.raises(InputError, match=rf"^{tmp_path}/it: expected cached columns, found none"):
        cached_columns(tmp_path, Compute())


def test_full_disk_raises_oserror_and_can_be_resumed(tmp_path):
    """A file size limit stands for a full disk. The batches saved before it are not lost."""
    interrupt(tmp_path, 6)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            cached_columns(tmp_path / "other", Compute())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert str(caught.value.filename).startswith(str(tmp_path / "other"))
    assert_complete(cached_columns(tmp_path / "other", Compute()))
    compute = Compute()
    assert_complete(cached_columns(tmp_path, compute))
    assert compute.starts == [6, 9]


def test_allocate_reserves_blocks_on_the_disk(tmp_path):
    """A mapped file without blocks would kill the process with SIGBUS on a full disk."""
    file = tmp_path / "sparse"
    with open(file, "wb") as opened:
        opened.truncate(1 << 20)
    assert file.stat().st_blocks * 512 < 1 << 20
    column_store._allocate(file)
    assert file.stat().st_blocks * 512 >= 1 << 20 and file.stat().st_size == 1 << 20


def test_two_callers_of_one_cache_compute_it_once(tmp_path):
    begun, may_end = threading.Event(), threading.Event()

    class Slow(Compute):
        def __call__(self, start):
            begun.set()
            assert may_end.wait(60)
            return super().__call__(start)

    results, computes = [], (Slow(), Compute())

    def call(compute):
        results.append(cached_columns(tmp_path, compute))

    threads = [threading.Thread(target=call, args=(compute,)) for compute in computes]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()  # it waits for the lock
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2 and not computes[1].starts
    for columns in results:
        assert_complete(columns)
