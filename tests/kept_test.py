"""What is dear is computed once, whoever is killed on the way."""

import threading

import numpy as np
import pytest

from spsjax import InputError
from spsjax.data import column_store

COUNT, BATCH = 11, 3
SQUARES = np.arange(COUNT)[:, None] * np.arange(2) ** 2
NAMES = np.arange(COUNT, dtype=np.int8)


class Computed:
    """Computes the columns, and remembers which batches; at row `ends` it is interrupted."""

    def __init__(self, ends=None):
        self.starts, self.ends = [], ends

    def __call__(self, start):
        if start == self.ends:
            raise KeyboardInterrupt
        self.starts.append(start)
        rows = np.minimum(np.arange(start, start + BATCH), COUNT - 1)  # filled up
        return {"squares": SQUARES[rows], "names": NAMES[rows]}


def assert_whole(found):
    assert sorted(found) == ["names", "squares"]
    for column, expected in ((found["squares"], SQUARES), (found["names"], NAMES)):
        assert column.dtype == expected.dtype
        np.testing.assert_array_equal(column, expected)


@pytest.fixture(autouse=True)
def nothing_is_lost(monkeypatch):
    monkeypatch.setattr(column_store, "_LOSS", 0)


def columns(folder, compute):
    return column_store.columns(folder / "it", COUNT, BATCH, compute, "it")


def test_is_computed_once(tmp_path):
    computed = Computed()
    for _ in range(2):
        assert_whole(columns(tmp_path, computed))
    assert computed.starts == [0, 3, 6, 9]


@pytest.mark.parametrize("ends", [0, 3, 9])
def test_what_is_interrupted_goes_on(tmp_path, ends):
    with pytest.raises(KeyboardInterrupt):
        columns(tmp_path, Computed(ends))
    assert not (tmp_path / "it").exists()
    # More was written than was noted: the next one writes over it.
    for path in tmp_path.glob(".it.partial/*.npy"):
        path.write_bytes(path.read_bytes() + b"x" * 100)
    computed = Computed()
    assert_whole(columns(tmp_path, computed))
    assert computed.starts == list(range(ends, COUNT, BATCH))
    columns(tmp_path / "undisturbed", Computed())
    for path in (tmp_path / "it").iterdir():
        assert path.read_bytes() == (tmp_path / "undisturbed" / "it" / path.name).read_bytes()


def test_a_note_of_rows_that_are_not_there_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        columns(tmp_path, Computed(6))
    path = tmp_path / ".it.partial" / "squares.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"^{path}: expected 6 rows of 11, or no such folder, fo"):
        columns(tmp_path, Computed())


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "it").mkdir()
    with pytest.raises(InputError, match=rf"^{tmp_path}/it: expected columns that were kept,"):
        columns(tmp_path, Computed())


def test_of_two_that_want_the_same_one_computes_it(tmp_path):
    begun, may_end = threading.Event(), threading.Event()

    class Slow(Computed):
        def __call__(self, start):
            begun.set()
            assert may_end.wait(60)
            return super().__call__(start)

    found, computed = [], (Slow(), Computed())
    threads = [
        threading.Thread(target=lambda each=each: found.append(columns(tmp_path, each)))
        for each in computed
    ]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()  # it waits
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and not computed[1].starts
    for each in found:
        assert_whole(each)
