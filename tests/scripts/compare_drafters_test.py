"""Tests of compare_drafters.py with drafters of random weights: its table and its refusals."""

import json
import pathlib

import numpy as np
import pytest
from helpers import command_line
from helpers.numpy_models import drawn
from helpers.tiny_training import head_config, untrained_target

import spsjax
from spsjax import loading
from spsjax.drafters import medusa
from spsjax.training.train_head import build_drafter

SMALL = (
    "--config.prompts=2",
    "--config.prompt_tokens=10",
    "--config.max_new_tokens=8",
    "--config.chains=3",
    "--config.branching=((2,1),)",
    "--config.dynamic=((4,2,2),)",
    "--config.run_settings=('cold','greedy')",
)


@pytest.fixture(scope="module")
def comparison(texts, tmp_path_factory) -> tuple[pathlib.Path, tuple[str, ...]]:
    """A folder, and flags that compare three drafters, of which one has a tree of its own."""
    folder = tmp_path_factory.mktemp("comparison")
    target = untrained_target(texts, tmp_path_factory.getbasetemp())
    model = spsjax.load(target)
    eagle3 = build_drafter(head_config("eagle3", texts, target).drafter, model.config)
    heads = medusa.Drafter(model.config, num_heads=2)
    for name, drafter in (("eagle3", eagle3), ("medusa", heads)):
        params = drawn(drafter.param_shapes(np.float32), 0, 0.2)
        for key in drafter.constants:  # the tokens that can be drafted: all
            params[key] = np.arange(len(params[key]), dtype=np.int32)
        spsjax.save_drafter(folder / name, loading.LoadedDrafter("", drafter, params), model)
    tree = folder / "tree.json"
    tree.write_text('{"parents": [0, 0, 2], "replacement": false, "chosen": true}', "utf-8")
    drafters = f"EAGLE-3={folder}/eagle3,look up=ngram,Medusa={folder / 'medusa'}"
    source = f"--config.data.train=('{texts}',)", f"--target={target}"
    flags = *source, *SMALL, f"--drafters={drafters}", f"--workdir={folder}"
    return folder, flags


@pytest.mark.slow
def test_compare_drafters_shows_every_drafter_in_every_shape(comparison):
    folder, flags = comparison
    more = f"--trees=Medusa={folder / 'tree.json'}", "--verifiers=Medusa=typical"
    shown = command_line.succeeds("compare_drafters.py", *flags, *more).stdout
    assert (folder / "table.png").stat().st_size and (folder / "table.md").read_text() in shown
    rows = json.loads((folder / "table.json").read_text("utf-8"))["rows"]
    shapes = {
        "EAGLE-3": ["chain of 3", "tree of 4 (2-1)", "dynamic tree of 4 (2 x 2)"],
        "look up": ["chain of 3"],
        "Medusa": ["tree of 4 (2-1)", "dynamic tree of 4 (2 x 2)", "own tree of 3"],
    }
    for setting in ("cold", "greedy"):
        for name, expected in shapes.items():
            own = [row for row in rows if (row["setting"], row["drafter"]) == (setting, name)]
            lossless = [row for row in own if row["rule"] is None]
            assert [row["shape"] for row in lossless] == expected
            lossy = [row["shape"] for row in own if row["rule"] == "typical"]
            assert lossy == (expected if name == "Medusa" else [])
            assert {row["tokens"] for row in own} == {16}
            assert all((row["surprise"] is None) == (setting == "greedy") for row in own)
            for row in lossless:
                assert 1 <= row["tokens_per_call"] <= 4 and row["speedup"] > 0
                assert row["ms_per_draft"] > 0
            assert (lossless[0]["bytes"] == 0) == (name == "look up")
            same = {True if setting == "greedy" else None}
            assert {row["same_tokens"] for row in lossless} == same
            # The look-up may find nothing in so short a text.
            most = 2 if name == "Medusa" else 3
            assert len(lossless[0]["acceptance_by_depth"] or most * [0]) == most


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--drafters=EAGLE-3", "drafters: expected NAME=PATH, each name once, found 'EAGLE-3'"),
        ("--trees=Falcon=tree.json", "trees: expected a name of --drafters, found 'Falcon'"),
        ("--verifiers=Falcon=match", "verifiers: expected a name of --drafters, found 'Falcon'"),
        ("--verifiers=Medusa=odd", "verifier: expected block, "),
        ("--verifiers=Medusa=kseq", "verifiers: Medusa: verifier: expected "),
        ("--drafters=a=none", "drafters: expected drafters, found none, which drafts nothing"),
        ("--trees=Medusa=nowhere", "nowhere: expected a file that plan_tree.py wrote"),
        ("--drafters=a=ngram,a=ngram", "each name once, found 'a=ngram'"),
        ("--drafters=a=nowhere", "nowhere"),
        ("--config.dynamic=((4,2),)", "dynamic: expected (nodes, levels, width), found (4, 2)"),
        ("--config.dynamic=(4,2,2)", "dynamic: expected (nodes, levels, width), found 4"),
        ("--config.branching=(4,2)", "branching: expected a tuple of tuples, found 4 in it"),
        ("--config.chains=0", "chains: expected an integer >= 1, found 0"),
        ("--config.prompts=0", "prompts: expected an integer >= 1, found 0"),
    ],
)
def test_compare_drafters_refuses_in_one_line(comparison, flag, message):
    _, flags = comparison
    command_line.fails_with_one_line(command_line.run("compare_drafters.py", *flags, flag), message)
