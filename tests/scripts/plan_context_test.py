"""plan_context.py as users run it, and times of a small cache on this machine."""

import json

import jax
import numpy as np
import pytest
from helpers.command_line import fails_with_one_line, launch, run, succeeds
from helpers.models import tiny_config
from helpers.numpy_models import numpy_params

from spsjax.performance import decode_times
from spsjax.performance.decode_times import Cell

MAP = (
    "--config.devices=('v5p:4','H200:1')",
    "--config.batches=(1,64)",
    "--config.contexts=(1024,32768)",
)


@pytest.mark.process
def test_map_has_a_cell_for_every_batch_and_context_and_is_drawn(tmp_path):
    """Llama 3.1 8B: small caches are best at length; 64 long texts do not fit one GPU."""
    out = succeeds("plan_context.py", *MAP, f"--workdir={tmp_path}", by=launch).stdout
    rows = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    assert [(row["devices"], row["batch"], row["context"]) for row in rows] == [
        (devices, batch, context)
        for devices in ("v5p:4", "H200:1")
        for batch in (1, 64)
        for context in (1024, 32768)
    ]
    found = {(row["devices"], row["batch"], row["context"]): row for row in rows}
    assert found["v5p:4", 1, 1024]["name"] == "model"
    assert found["v5p:4", 64, 32768]["name"] in ("window", "sparse_self")
    assert not found["H200:1", 64, 32768]["fits"]
    assert "llama:3.1-8b on v5p:4" in out and "32768" in out
    assert (tmp_path / "map.png").stat().st_size > 10_000


@pytest.mark.slow
def test_points_are_measured_beside_the_prediction(tmp_path):
    shape = "--config.measured.shape."
    small = (
        f"{shape}vocab_size=48",
        f"{shape}d_model=32",
        f"{shape}d_ff=32",
        f"{shape}num_layers=2",
        f"{shape}num_heads=2",
        f"{shape}num_kv_heads=2",
        f"{shape}head_dim=16",
        "--config.measured.points=((2,300),)",
        "--config.measured.new_tokens=8",
        "--config.measured.slots=32",
        "--config.measured.repetitions=1",
    )
    out = succeeds("plan_context.py", *MAP, *small, f"--workdir={tmp_path}", "--measure").stdout
    (row,) = json.loads((tmp_path / "measured.json").read_text(encoding="utf-8"))
    assert (row["batch"], row["context"]) == (2, 300)
    assert row["tokens"] == pytest.approx(sum(0.85**i for i in range(5)))
    plain, drafted = (row["ms"][name]["ms"] for name in ("plain round", "round"))
    assert row["speedup"] == pytest.approx(row["tokens"] * plain / drafted)
    assert "predicted" in out


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--config.devices=('v9:4',)", "devices"),
        ("--config.devices=('v5p',)", "devices"),
        ("--config.batches=(0,)", "batches"),
        ("--config.devices=(4,)", "devices"),
        ("--config.collective_us=-5.0", "collective_us"),
        ("--target=gpt2:small", "contexts"),
        ("--draft=gemma:2-2b", "windows"),
        ("--config.acceptance.model=2.0", "acceptance"),
        ("--config.slots=0", "slots"),
        ("--target=llama:9b", "llama:9b"),
    ],
)
def test_bad_flags_are_refused_in_one_line(tmp_path, flag, named):
    fails_with_one_line(run("plan_context.py", *MAP, flag, f"--workdir={tmp_path}"), named)


def test_small_cache_is_timed_full(tmp_path):
    """Its window holds the first and the last tokens of the context, and goes on from there."""
    pair = decode_times.Pair(
        tiny_config(48, num_layers=2, max_positions=512),
        tiny_config(48),
        acceptance=0.5,
        new_tokens=8,
        dtype="float32",
    )
    cell = Cell("rounds", 2, 100, 3, slots=16)
    compiled = decode_times.compile_all(pair, [cell], threads=1, seconds=1e9)[cell]
    params = {"target": jax.device_put(numpy_params(pair.target, 0)), "drafter": {}}
    limit = np.int32(decode_times.slots_of(pair, cell) - 4)
    state = compiled.begin(params, np.int32(100), limit, decode_times._keys(2))
    held = set(state.drafter.held[0].tolist())
    assert {*range(4), *range(99 - 12, 99)} <= held
    state = compiled.timed(params, state, np.int32(2))
    assert (state.lengths > 101).all() and not state.failed.any()
    cache = 2 * 2 * 4 * 2 * 2  # keys and values, heads, size, layers, rows
    weights = decode_times.bytes_read(pair, Cell("score", 2, 0)) // 4
    expected = 4 * weights + (3 * 16 + 100 + 4) * cache
    assert decode_times.bytes_read(pair, cell) // 4 == expected
