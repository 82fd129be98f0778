"""plan.py as users run it, and times of a small cache on this machine."""

import itertools
import json

import jax
import numpy as np
import pytest
from helpers.command_line import fails_with_one_line, launch, run, settings, succeeds
from helpers.models import tiny_config
from helpers.numpy_models import numpy_params

import spsjax
from spsjax import loading
from spsjax.benchmarks import shapes
from spsjax.benchmarks.shapes import Cell
from spsjax.drafters import medusa

EXPERIMENTS = "--config=configs/experiments/"
SPEEDUP, TREE = f"{EXPERIMENTS}plan_speedup.py", f"{EXPERIMENTS}plan_tree.py"
MAP = (
    f"{EXPERIMENTS}plan_context.py",
    *settings(devices="('v5p:4','H200:1')", batches="(1,64)", contexts="(1024,32768)"),
)
SMALL_TREE = (
    TREE,
    *settings(prompts=2, prompt_tokens=10, max_new_tokens=6, most_children=2, repetitions=1),
)


def test_speedup_is_printed_and_drawn(tmp_path):
    shown = succeeds("plan.py", "--config.acceptance=0.8", f"--workdir={tmp_path}").stdout
    assert "best: K = 5, 2.25 x plain sampling" in shown
    figures = json.loads((tmp_path / "speedup.json").read_text(encoding="utf-8"))
    assert figures[""]["5"][:2] == pytest.approx([3.689, 3.689 / (5 * 1.8 / 14.1 + 1)], 1e-3)
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
    shown = succeeds("plan.py", "--config.children=0.6,0.3", "--config.num_nodes=2").stdout
    assert "tree of 2" in shown and "best: " in shown


@pytest.mark.process
def test_tree_of_a_pair_is_one_that_generate_takes(pair, tmp_path):
    flags = (*SMALL_TREE, *pair, "--config.num_nodes=1,3", f"--workdir={tmp_path}")
    shown = succeeds("plan.py", *flags).stdout
    for text in ("95% interval", "tokens per call", "chain", "tree of 3", "tree.json"):
        assert text in shown
    tree = json.loads((tmp_path / "tree.json").read_text(encoding="utf-8"))
    assert tree["parents"][0] == 0 and len(tree["rates"]) == 2 and tree["speedup"] > 0
    same_greedy_texts(pair, tmp_path / "tree.json")


@pytest.mark.slow
def test_tree_of_a_head_chooses_tokens_by_depth_and_rank(pair, tmp_path):
    folder = pair[0].partition("=")[2]
    target = spsjax.load(folder)
    drafter = medusa.Drafter(target.config, num_heads=2)
    weights = drafter.init_params(jax.random.key(0))
    weights = drafter.from_target(weights, {"target": target.params, "drafter": {}})
    spsjax.save_drafter(tmp_path / "head", loading.LoadedDrafter("", drafter, weights), target)
    both = (pair[0], f"--draft={tmp_path / 'head'}")
    flags = (*SMALL_TREE, *both, "--config.num_nodes=1,4", f"--workdir={tmp_path}")
    shown = succeeds("plan.py", *flags).stdout
    parts = "level 1, rank", "level 2, rank", "tree of 4", "speed-up"
    assert all(text in shown for text in parts)
    tree = json.loads((tmp_path / "tree.json").read_text(encoding="utf-8"))
    assert tree["chosen"] and len(tree["rates"]) == 2
    same_greedy_texts(both, tmp_path / "tree.json")


def same_greedy_texts(pair, tree) -> None:
    flags = (*pair, "--prompt=def f(x):", "--json", "--config.sampling.temperature=0")
    flags += (*settings(max_new_tokens=8, stop_at_eos="false"),)
    with_tree = succeeds("generate.py", *flags, f"--config.tree={tree}")
    plain = succeeds("generate.py", *flags, "--config.drafter=none")
    assert json.loads(with_tree.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]


@pytest.mark.process
def test_map_has_a_cell_for_every_batch_and_context_and_is_drawn(tmp_path):
    """Llama 3.1 8B: small caches are best at length; 64 long texts do not fit one GPU."""
    out = succeeds("plan.py", *MAP, f"--workdir={tmp_path}", by=launch).stdout
    rows = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    cells = itertools.product(("v5p:4", "H200:1"), (1, 64), (1024, 32768))
    assert [(row["devices"], row["batch"], row["context"]) for row in rows] == [*cells]
    first, *_, split, _, _, _, large = rows
    assert first["name"] == "model" and split["name"] in ("window", "sparse_self")
    assert not large["fits"]
    assert "llama:3.1-8b on v5p:4" in out and "32768" in out
    assert (tmp_path / "map.png").stat().st_size > 10_000


@pytest.mark.slow
def test_points_are_measured_beside_the_prediction(tmp_path):
    shape = {
        "vocab_size": 48, "d_model": 32, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "num_kv_heads": 2, "head_dim": 16,
    }  # fmt: skip
    measured = {"points": "((2,300),)", "new_tokens": 8, "slots": 32, "repetitions": 1}
    measured |= {f"shape.{name}": size for name, size in shape.items()}
    small = {f"measured.{name}": value for name, value in measured.items()}
    small = settings(small, measure=True)
    out = succeeds("plan.py", *MAP, *small, f"--workdir={tmp_path}").stdout
    (row,) = json.loads((tmp_path / "measured.json").read_text(encoding="utf-8"))
    assert (row["batch"], row["context"]) == (2, 300)
    assert row["tokens"] == pytest.approx(sum(0.85**i for i in range(5)))
    plain, drafted = (row["ms"][name]["ms"] for name in ("plain round", "round"))
    assert row["speedup"] == pytest.approx(row["tokens"] * plain / drafted)
    assert "predicted" in out


BAD = {
    SPEEDUP: [
        ("--config.acceptance=2", "acceptance"),
        ("--config.report=none", "none"),
        (
            "--config.children=0.9,0.9",
            "--config.children: expected rates with a sum of at most 1, found 1.8",
        ),
        ("--target=pystdlib/target", "--target: expected no value"),
    ],
    TREE: [
        ("--config.num_nodes=0", "num_nodes: expected an integer >= 1"),
        ("--config.num_nodes=()", "num_nodes: expected at least one"),
        ("--config.sampling.top_p=2.0", "top_p"),
    ],
    MAP[0]: [
        ("--config.devices=('v9:4',)", "devices"),
        ("--config.batches=(0,)", "batches"),
        ("--config.contexts=(1000000,)", "--config.contexts: expected at most the target's"),
        ("--draft=gemma:2-2b", "windows"),
        ("--config.acceptance.model=2.0", "--config.acceptance.model: expected a finite number"),
    ],
}


@pytest.mark.parametrize(
    ("config", "flag", "named"), [(config, *bad) for config in BAD for bad in BAD[config]]
)
def test_bad_flag_is_refused_in_one_line(tmp_path, config, flag, named):
    """Nothing is written then."""
    fails_with_one_line(run("plan.py", config, flag, f"--workdir={tmp_path / 'x'}"), named)
    assert not (tmp_path / "x").exists()


def test_missing_folder_and_flags_of_compile_are_refused():
    fails_with_one_line(run("plan.py", TREE), "--workdir: expected a folder")
    expected = "expected one of dflash, dflash2, dspark, eagle, eagle3, gemma4_assistant, mtp, "
    fails_with_one_line(run("compile.py", "--drafter=nosuch"), expected)
    fails_with_one_line(run("compile.py", "--config.batch=0"), "batch")


def test_small_cache_is_timed_full(tmp_path):
    """Its window holds the first and the last tokens of the context, and goes on from there."""
    target = tiny_config(48, num_layers=2, max_positions=512)
    pair = shapes.ShapePair(target, tiny_config(48), acceptance=0.5, new_tokens=8, dtype="float32")
    cell = Cell("rounds", 2, 100, 3, slots=16)
    compiled = shapes.compile_all(pair, [cell], threads=1, seconds=1e9)[cell]
    params = {"target": jax.device_put(numpy_params(pair.target, 0)), "drafter": {}}
    limit = np.int32(shapes.slots_of(pair, cell) - 4)
    state = compiled.begin(params, np.int32(100), limit, shapes.row_keys(2))
    cached = set(state.drafter.slot_positions[0].tolist())
    assert {*range(4), *range(99 - 12, 99)} <= cached
    state = compiled.timed(params, state, np.int32(2))
    assert (state.lengths > 101).all() and not state.failed.any()
    cache = 2 * 2 * 4 * 2 * 2  # keys and values, heads, size, layers, rows
    weights = shapes.bytes_read(pair, Cell("score", 2, 0)) // 4
    expected = 4 * weights + (3 * 16 + 100 + 4) * cache
    assert shapes.bytes_read(pair, cell) // 4 == expected
