"""Times of the loop at given shapes: what is compiled, how many bytes it reads, and in turn."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
from helpers.models import tiny_config

from spsjax.models import transformer
from spsjax.performance import decode_times
from spsjax.performance.decode_times import Cell
from spsjax.utils.turns import Turns

PAIR = decode_times.Pair(
    tiny_config(48, num_layers=2), tiny_config(48), acceptance=0.5, new_tokens=8, dtype="float32"
)
CELLS = (
    Cell("rounds", 2, 10),
    Cell("rounds", 2, 10, 3),
    Cell("rounds", 1, 10, branching=(2, 1)),
    Cell("draft", 2, 10, 3),
    Cell("score", 2, 10, 3),
)


@pytest.fixture(scope="module")
def compiled():
    return decode_times.compile_all(PAIR, CELLS, threads=2, seconds=1e9)


@pytest.mark.slow
def test_every_cell_is_timed_once_and_in_order(compiled):
    """Rounds of chains have the expected tokens of the forced rate; passes and trees have none."""
    times = list(decode_times.time_cells(PAIR, compiled, 1e9, repetitions=2, seconds=1e9))
    assert [row.cell for row in times] == [*CELLS]
    assert [row.cell.name for row in times] == ["ArS", "SpS 3", "tree 4", "draft 3", "score 4"]
    assert all(0 < row.fastest_ms <= row.ms <= row.slowest_ms for row in times)
    assert [row.tokens for row in times] == [1.0, 1.875, None, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.kind == "rounds"])
def test_no_row_ends_before_the_last_round(compiled, cell):
    """A round of a row that is done would cost as much, and give nothing."""
    keys = decode_times._keys(cell.batch)
    params = {"target": transformer.init(PAIR.target, jax.random.key(0))}
    params["drafter"] = transformer.init(PAIR.draft, jax.random.key(1)) if cell.drafts else {}
    limit = decode_times.slots_of(PAIR, cell) - cell.depth - 1
    state = compiled[cell].begin(params, np.int32(cell.context), np.int32(limit), keys)
    assert all(np.ptp(np.asarray(keys)) > 0 for keys in state.cache.keys)  # zeros can be faster
    rounds = decode_times.rounds_of(PAIR, cell)
    state = compiled[cell].timed(params, state, np.int32(rounds))
    assert not state.done.any() and not state.failed.any()
    assert set(state.rounds.tolist()) == {rounds}
    assert (state.lengths >= cell.context + rounds).all()


def test_bytes_are_those_of_weights_and_filled_caches():
    """By hand: a tied embedding is read whole, one that is only looked up is not."""
    layer = 32 * (32 + 8 + 8 + 32) + 3 * 32 * 32 + 2 * 32
    head = 48 * 32 + 32  # and the last norm
    cache = 2 * 2 * 4  # keys and values, two heads of size 4, per layer, row and token
    target, draft = 2 * layer + head, layer + head
    reads = [decode_times.bytes_read(PAIR, cell) // 4 for cell in CELLS]
    # Two rows of ten tokens, and in rounds half of the eight new ones.
    of_target, of_draft = target + 2 * 2 * 14 * cache, 3 * (draft + 2 * 14 * cache)
    tree = target + 2 * 14 * cache + 2 * (draft + 14 * cache)
    alone = 3 * (draft + 2 * 10 * cache), target + 2 * 2 * 10 * cache
    assert reads == [of_target, of_target + of_draft, tree, *alone]
    learned = dataclasses.replace(PAIR, target=tiny_config(48, positions="learned"))
    assert decode_times.bytes_read(learned, CELLS[4]) // 4 == draft + 2 * 10 * cache


def test_nothing_begins_after_the_time_is_up():
    assert decode_times.compile_all(PAIR, CELLS, threads=1, seconds=-1) == {}
    compiled = dict.fromkeys(CELLS)  # not looked at
    assert not list(decode_times.time_cells(PAIR, compiled, 1e9, repetitions=1, seconds=-1))


def test_cells_that_fail_are_noted_and_the_others_go_on(monkeypatch):
    """As where one does not fit into memory, when it is compiled or when it runs."""
    notes, compile_cell, run = [], decode_times.compile_cell, decode_times._run

    def failing(function):
        def call(pair, cell, *rest):
            if cell == CELLS[0]:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
            return function(pair, cell, *rest)

        return call

    monkeypatch.setattr(decode_times, "compile_cell", failing(compile_cell))
    monkeypatch.setattr(decode_times, "_run", failing(run))
    cells = CELLS[0], CELLS[4]
    compiled = decode_times.compile_all(PAIR, cells, 1, 1e9, notes.append)
    assert [*compiled] == [CELLS[4]]
    compiled = {CELLS[0]: None, **compiled}
    times = list(decode_times.time_cells(PAIR, compiled, 1e9, 1, 1e9, note=notes.append))
    assert [row.cell for row in times] == [CELLS[4]]
    assert [note.partition(": RESOURCE")[0] for note in notes] == [
        "ArS, batch 2, context 10: not compiled",
        "ArS, batch 2, context 10: not timed",
    ]


def test_turns_wait_for_those_who_prepare_and_never_overlap(tmp_path):
    """The first to be ready waits for the second, which still compiles."""
    one, two, log = Turns(tmp_path / "lock"), Turns(tmp_path / "lock"), []

    def measure(name, turns):
        with turns.alone():
            log.append((name, "begins"))
            time.sleep(0.05)
            log.append((name, "ends"))

    first = threading.Thread(target=measure, args=("one", one))
    first.start()
    first.join(0.2)
    assert first.is_alive() and not log
    measure("two", two)
    first.join()
    names = [name for name, _ in log]
    assert names in (["one", "one", "two", "two"], ["two", "two", "one", "one"])
    with Turns(None).alone():  # nobody to wait for
        pass
