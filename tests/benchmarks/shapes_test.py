"""Times at given shapes: what is compiled, how many bytes it reads, and the script."""

import dataclasses
import importlib.util
import json
from unittest import mock

import jax
import numpy as np
import pytest
from helpers.command_line import ROOT, fails_with_one_line, launch, run, succeeds
from helpers.models import tiny_config

from spsjax.benchmarks import flips, shapes
from spsjax.benchmarks.peers import hf, hf_shapes
from spsjax.benchmarks.shapes import Cell
from spsjax.models import transformer

PAIR = shapes.ShapePair(
    tiny_config(48, num_layers=2), tiny_config(48), acceptance=0.5, new_tokens=8, dtype="float32"
)
CELLS = (
    Cell("rounds", 2, 10), Cell("rounds", 2, 10, 3), Cell("rounds", 1, 10, branching=(2, 1)),
    Cell("draft", 2, 10, 3), Cell("score", 2, 10, 3),
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled():
    return shapes.compile_all(PAIR, CELLS, threads=2, seconds=1e9)


@pytest.mark.slow
def test_every_cell_is_timed_once_and_in_order(compiled):
    """Rounds of chains have the expected tokens of the forced rate; passes and trees have none."""
    times = list(shapes.time_cells(PAIR, compiled, 1e9, repetitions=2, seconds=1e9))
    assert [row.cell for row in times] == [*CELLS]
    assert [row.cell.name for row in times] == ["ArS", "SpS 3", "tree 4", "draft 3", "score 4"]
    assert all(0 < row.fastest_ms <= row.ms <= row.slowest_ms for row in times)
    assert [row.tokens for row in times] == [1.0, 1.875, None, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.kind == "rounds"])
def test_no_row_ends_before_the_last_round(compiled, cell):
    """A round of a row that is done would cost as much, and give nothing."""
    keys = shapes.row_keys(cell.batch)
    params = {"target": transformer.init(PAIR.target, jax.random.key(0))}
    params["drafter"] = transformer.init(PAIR.draft, jax.random.key(1)) if cell.drafts else {}
    limit = shapes.slots_of(PAIR, cell) - cell.depth - 1
    state = compiled[cell].begin(params, np.int32(cell.context), np.int32(limit), keys)
    assert all(np.ptp(np.asarray(keys)) > 0 for keys in state.cache.keys)  # zeros can be faster
    rounds = shapes.rounds_of(PAIR, cell)
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
    reads = [shapes.bytes_read(PAIR, cell) // 4 for cell in CELLS]
    # Two rows of ten tokens, and in rounds half of the eight new ones.
    of_target, of_draft = target + 2 * 2 * 14 * cache, 3 * (draft + 2 * 14 * cache)
    tree = target + 2 * 14 * cache + 2 * (draft + 14 * cache)
    alone = 3 * (draft + 2 * 10 * cache), target + 2 * 2 * 10 * cache
    assert reads == [of_target, of_target + of_draft, tree, *alone]
    learned = dataclasses.replace(PAIR, target=tiny_config(48, positions="learned"))
    assert shapes.bytes_read(learned, CELLS[4]) // 4 == draft + 2 * 10 * cache


def test_nothing_begins_after_the_time_is_up():
    assert shapes.compile_all(PAIR, CELLS, threads=1, seconds=-1) == {}
    compiled = dict.fromkeys(CELLS)  # not looked at
    assert not list(shapes.time_cells(PAIR, compiled, 1e9, repetitions=1, seconds=-1))


def test_cells_that_fail_are_noted_and_the_others_go_on(monkeypatch):
    """As where one does not fit into memory, when it is compiled or when it runs."""
    notes, compile_cell, run = [], shapes.compile_cell, shapes._run

    def failing(function):
        def call(pair, cell, *rest):
            if cell == CELLS[0]:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
            return function(pair, cell, *rest)

        return call

    monkeypatch.setattr(shapes, "compile_cell", failing(compile_cell))
    monkeypatch.setattr(shapes, "_run", failing(run))
    cells = CELLS[0], CELLS[4]
    compiled = shapes.compile_all(PAIR, cells, 1, 1e9, notes.append)
    assert [*compiled] == [CELLS[4]]
    compiled = {CELLS[0]: None, **compiled}
    times = list(shapes.time_cells(PAIR, compiled, 1e9, 1, 1e9, note=notes.append))
    assert [row.cell for row in times] == [CELLS[4]]
    kinds = [note.partition(": RESOURCE")[0] for note in notes]
    assert kinds == [f"ArS, batch 2, context 10: not {what}" for what in ("compiled", "timed")]


TINY = f"--config={ROOT / 'configs' / 'experiments' / 'shapes.py'}:tiny"
HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


@pytest.mark.process
def test_script_stores_every_program_and_resumes(tmp_path):
    flags = TINY, f"--workdir={tmp_path}", "--config.profiled=1"
    flags += ("--peer=hf",) if HAS_TORCH else ()
    shown = succeeds("benchmark.py", *flags, by=launch).stdout
    result = json.loads((tmp_path / "table.json").read_text())
    names = ["ArS", "SpS 2", "score 1", "score 3", "draft 2", "tree 4"]
    names += ["HF plain", "HF assisted", "HF compiled"] if HAS_TORCH else []
    assert [row["program"] for row in result["rows"]] == names
    assert [row["texts"] for row in result["flips"]] == [1, 1, 1]
    assert (tmp_path / "table.md").read_text() in shown
    # In a process of its own: the profiler can crash one that has loaded thousands of programs.
    profile = tmp_path / "profile-tiny"
    assert "HloModule" in (profile / "ArS" / "program.txt").read_text()
    assert len(list(profile.rglob("*.trace.json.gz"))) == 1
    path = tmp_path / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    succeeds("benchmark.py", *flags, by=launch)
    again = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert again[:-1] == result["rows"][:-1] and again[-1]["program"] == names[-1]


def test_script_refuses_in_one_line(tmp_path):
    for flag, message in (
        ("--peer=openvino", "--peer: expected hf"),
        ("--target=x", "--target: expected no value with benchmark = shapes"),
    ):
        fails_with_one_line(run("benchmark.py", TINY, f"--workdir={tmp_path}", flag), message)


def test_huggingface_drafts_for_one_row_only():
    calls = hf_shapes.calls_of(("plain", "assisted"), (1, 8), (128,))
    assert calls == [("plain", 1, 128), ("assisted", 1, 128), ("plain", 8, 128)]


def test_huggingface_times_are_the_slope_between_two_lengths(monkeypatch):
    """The prompt's second does not count, nor does the first call; a hook counts the passes."""
    library = mock.MagicMock()
    library.ready = lambda model: model
    model = library.transformers.AutoModelForCausalLM.from_config.return_value
    model.config.vocab_size = 9

    def generate(target, prompts, max_new_tokens, **options):
        assert len(prompts) == 2 and {*map(len, prompts)} == {5}
        for _ in range(max_new_tokens if target.register_forward_hook.called else 0):
            target.register_forward_hook.call_args[0][0]()
        return 1 + 0.002 * max_new_tokens, prompts

    library.generate = generate
    monkeypatch.setattr(hf, "Library", lambda: library)
    models = hf_shapes.HFShapes(PAIR, 3)
    plain = models.time("plain", 2, 5, 8, 2)
    assert plain.ms == pytest.approx(2) and plain.tokens == 1
    assert plain.first_seconds == pytest.approx(1.016)
    assert models.time("assisted", 2, 5, 8, 1).tokens == 1.875


@pytest.mark.slow
def test_flips_counts_texts_that_differ(target, draft):
    """A pair agrees with itself; against other weights the first difference has a margin."""
    prompts = [[1, 2, 3], [4, 5, 6]]
    same, *_ = flips.compare({"a": (target, draft)}, prompts, 8, 2)
    assert (same.texts, same.differ, same.tokens, same.margins) == (2, 0, 16, [])
    *_, other = flips.compare({"a": (target, draft), "b": (draft, draft)}, prompts, 8, 2)
    assert other.compared == "ArS: a and b" and other.differ == len(other.margins) > 0
    assert other.differ <= other.tokens < 16
