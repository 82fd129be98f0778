"""Tests of whole trainings of drafters of the target's features, of tiny size."""

import functools
import json
import pathlib
import runpy
import shutil

import jax
import numpy as np
import pytest
from helpers import command_line, tiny_training
from helpers.environment import ROOT
from helpers.tiny_training import SMALL, records

import spsjax
from spsjax import InputError, loading
from spsjax.drafters import medusa
from spsjax.parallel import sharding
from spsjax.training.train_head import train_head
from spsjax.training.train_target import train_target

STEPS = {
    "eagle": 1,
    "hass": 2,
    "eagle3": 3,
    "medusa": 4,
    "blockwise": 4,
    "mlp_speculator": 4,
    "falcon": 2,
}
GREEDY = spsjax.SamplingParams(0.0)


def config(method, texts, target, **changes):
    """The config of a method, made small and changed."""
    small = runpy.run_path(str(ROOT / "configs" / "drafters" / f"{method}.py"))["get_config"]()
    small.update(SMALL | {"data": {"train": (texts,)}, "target": str(target / "model")})
    small.target_cache.store = "nothing"
    small.objective.steps = STEPS.get(method, 4)
    small.draft_eval.update({"prompts": 4, "prompt_length": 8, "new_tokens": 16})
    small.update(changes)
    return small


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    return tiny_training.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """The run folder of a target."""
    folder = tmp_path_factory.mktemp("runs") / "target"
    train_target(tiny_training.config("target", texts), folder)
    return folder


@pytest.fixture(scope="module")
def runs(texts, target, tmp_path_factory):
    """The run folders of all methods."""
    folder = tmp_path_factory.mktemp("heads")
    for method in STEPS:
        train_head(config(method, texts, target), folder / method)
    return folder


@pytest.mark.parametrize("method", STEPS)
def test_run_logs_acceptance_by_depth_and_saves_a_drafter(runs, target, method):
    first, last = records(runs / method, "held_out")
    assert last["loss"]["mean"] < first["loss"]["mean"]
    assert last["acceptance"]["mean"] > first["acceptance"]["mean"]
    names = ["acceptance", *(f"acceptance_{depth}" for depth in range(2, 5))]  # K = 4 is deeper
    assert [name for name in last if name.startswith("acceptance")] == names
    assert 1 < records(runs / method, "temperature_1")[-1]["block_efficiency"] <= 5
    model = spsjax.load(target / "model")
    drafter = spsjax.load_drafter(runs / method / "drafter", model)
    out, plain = (
        spsjax.generate(model, ["def function", "total"], each, None, GREEDY, 12)
        for each in (drafter, None)
    )
    assert out.texts == plain.texts
    assert drafter.drafter.num_speculative_tokens == 4


@pytest.mark.parametrize("method", ["eagle", "falcon", "blockwise"])
def test_interrupted_run_ends_with_the_same_weights(runs, texts, target, tmp_path, method):
    """Without its last checkpoint a run goes on from the one before."""
    again = tmp_path / method
    shutil.copytree(runs / method, again)
    shutil.rmtree(again / "checkpoints" / "step_30")
    shutil.rmtree(again / "drafter")
    train_head(config(method, texts, target), again)
    one, other = (folder / "drafter" / "model.safetensors" for folder in (runs / method, again))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("method", ["eagle3", "mlp_speculator"])
def test_training_begins_with_the_weights_of_a_drafter(runs, texts, target, tmp_path, method):
    """With almost no learning rate they stay as they are."""
    init = str(runs / method / "drafter")
    changed = config(method, texts, target, init=init)
    changed.optimization.learning_rate = 1e-12
    found = train_head(changed, tmp_path).params
    expected = spsjax.load_drafter(init, spsjax.load(target / "model")).params
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found, expected)
    changed.init = str(runs / "medusa" / "drafter")
    with pytest.raises(InputError, match=r"^init: expected a drafter of the shape"):
        train_head(changed, tmp_path / "other")


def test_medusa_2_trains_the_target_too(runs, texts, target, tmp_path):
    """The drafter belongs to the new target, which is near the old one."""
    changed = config("medusa2", texts, target, init=str(runs / "medusa" / "drafter"))
    train_head(changed, tmp_path)
    old, new = spsjax.load(target / "model"), spsjax.load(tmp_path / "model")
    moved = jax.tree.map(
        lambda a, b: float(np.abs(np.subtract(a, b)).max()), old.params, new.params
    )
    assert all(change > 0 for change in jax.tree.leaves(moved)), moved
    last = records(tmp_path, "held_out")[-1]
    assert 0 < last["target_divergence"]["mean"] < 0.1
    assert (
        last["acceptance"]["mean"] > records(runs / "medusa", "held_out")[-1]["acceptance"]["mean"]
    )
    drafter = spsjax.load_drafter(tmp_path / "drafter", new)
    out, plain = (
        spsjax.generate(new, ["def function", "total"], each, None, GREEDY, 12)
        for each in (drafter, None)
    )
    assert out.texts == plain.texts
    changed.target_cache.store = "states"
    with pytest.raises(InputError, match=r"^target_cache.store: expected 'nothing'"):
        train_head(changed, tmp_path / "other")


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_cached_features_train_like_a_running_target(
    runs,
    texts,
    target,
    tmp_path,
    method,
):
    changed = config(method, texts, target)
    changed.target_cache.store = "states"
    head = train_head(changed, tmp_path)
    model = spsjax.load(target / "model")
    expected = spsjax.load_drafter(runs / method / "drafter", model).params
    for name in ("fc", "layer"):
        pairs = zip(jax.tree.leaves(head.params[name]), jax.tree.leaves(expected[name]))
        for found, wanted in pairs:  # features are stored in float16, drafters in bfloat16
            np.testing.assert_allclose(found, wanted.astype("float32"), atol=0.05)


def test_head_trains_on_a_mesh_and_on_the_target_s_own_texts(texts, target, tmp_path):
    """It learns what one device learns."""
    changed = config("eagle3", texts, target)
    changed.mixture.update({"corpus": 0.5, "target": 0.5, "samples": 8, "prompt_length": 4})
    alone = train_head(changed, tmp_path / "alone")
    changed.mesh.update({"data": 2, "model": 4, "replicate": False})
    head = train_head(changed, tmp_path / "mesh", sharding.mesh(2, 4))
    assert not head.params["layer"]["ffn"]["up"]["kernel"].is_fully_replicated
    for found, expected in zip(*map(jax.tree.leaves, (head.params, alone.params))):
        np.testing.assert_allclose(found, expected, atol=1e-3)
    train = records(tmp_path / "mesh", "train")
    assert train[-1]["loss"] < train[0]["loss"]


def test_texts_of_a_target_that_are_prompts_only_are_refused(texts, target, tmp_path):
    changed = config("eagle", texts, target)
    changed.mixture.update({"corpus": 0.5, "target": 0.5, "prompt_length": changed.length})
    with pytest.raises(spsjax.InputError, match=r"mixture\.prompt_length: expected less"):
        train_head(changed, tmp_path)
    changed = config("eagle", texts, target)
    changed.draft_eval.update({"prompt_length": 2, "new_tokens": 1})
    with pytest.raises(spsjax.InputError, match=r"draft_eval\.new_tokens: expected texts of more"):
        train_head(changed, tmp_path)
    assert not list(tmp_path.iterdir())


def test_generate_drafts_with_a_head_and_shows_no_other_text(runs, target):
    flags = f"--target={target}/model", "--prompt=def", "--config.max_new_tokens=6", "--json"
    head = f"--draft={runs}/eagle3/drafter"
    greedy = "--config.sampling.temperature=0.0"
    out, plain = (
        json.loads(command_line.succeeds("generate.py", *flags, greedy, each).stdout)
        for each in (head, "--config.drafter=none")
    )
    assert out["tokens"] == plain["tokens"] and out["stats"]["proposed_tokens"] > 0


SMALL_COMPARISON = (
    "--config.prompts=2",
    "--config.prompt_tokens=10",
    "--config.max_new_tokens=8",
    "--config.chains=3",
    "--config.branching=((2,1),)",
    "--config.dynamic=((4,2,2),)",
    "--config.run_settings=('cold','greedy')",
)


def test_compare_drafters_shows_every_drafter_in_every_shape(runs, texts, target, tmp_path):
    model = spsjax.load(target / "model")
    drafter = medusa.Drafter(model.config, num_heads=2)
    head = loading.LoadedDrafter("", drafter, drafter.init_params(jax.random.key(0)))
    spsjax.save_drafter(tmp_path / "medusa", head, model)
    tree = tmp_path / "tree.json"
    tree.write_text('{"parents": [0, 0, 2], "replacement": false, "chosen": true}', "utf-8")
    drafters = f"EAGLE-3={runs}/eagle3/drafter,look up=ngram,Medusa={tmp_path / 'medusa'}"
    source = f"--config.data.train=('{texts}',)", f"--target={target}/model"
    flags = *source, *SMALL_COMPARISON, f"--drafters={drafters}", f"--workdir={tmp_path}"
    more = f"--trees=Medusa={tree}", "--verifiers=Medusa=typical"
    shown = command_line.succeeds("compare_drafters.py", *flags, *more).stdout
    assert (tmp_path / "table.png").stat().st_size and (tmp_path / "table.md").read_text() in shown
    rows = json.loads((tmp_path / "table.json").read_text("utf-8"))["rows"]
    shapes = {
        "EAGLE-3": ["chain of 3", "tree of 4 (2-1)", "dynamic tree of 4 (2 x 2)"],
        "look up": ["chain of 3"],
        "Medusa": ["tree of 4 (2-1)", "dynamic tree of 4 (2 x 2)", "own tree of 3"],
    }
    for setting in ("cold", "greedy"):
        for name, expected in shapes.items():
            own = [row for row in rows if (row["setting"], row["drafter"]) == (setting, name)]
            found = [row for row in own if row["rule"] is None]
            assert [row["shape"] for row in found] == expected
            lossy = [row["shape"] for row in own if row["rule"] == "typical"]
            assert lossy == (expected if name == "Medusa" else [])
            assert {row["tokens"] for row in own} == {16}
            assert all((row["surprise"] is None) == (setting == "greedy") for row in own)
            assert all(1 <= row["tokens_per_call"] <= 4 and row["speedup"] > 0 for row in found)
            assert all(row["ms_per_draft"] > 0 for row in found)
            assert (found[0]["bytes"] == 0) == (name == "look up")
            assert {row["same_tokens"] for row in found} == {True if setting == "greedy" else None}
            # The look-up may find nothing in so short a text.
            most = 2 if name == "Medusa" else 3
            assert len(found[0]["acceptance_by_depth"] or most * [0]) == most
    for flag, part in (
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
    ):
        command_line.fails_with_one_line(
            command_line.run("compare_drafters.py", *flags, flag), part
        )


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("mixture", "draft", 1.0, r"mixture"),
        ("target_cache", "store", "top_k", r"target_cache.store: expected 'nothing' or 'states'"),
        ("objective", "every", 99, r"objective.every: expected at most the length, found 99"),
        ("objective", "steps", 40, r"length: expected above objective.steps and .*, 40, by 2"),
        ("drafter", "tap_layers", (0, 9), r"tap_layers: expected layers in \[0, 2\]"),
        ("drafter", "vocab_size", 999, r"vocab_size: expected at most the target's 320"),
    ],
)
def test_config_that_cannot_be_trained_is_refused(
    texts,
    target,
    tmp_path,
    section,
    field,
    value,
    message,
):
    changed = config("eagle3", texts, target)
    changed[section][field] = value
    with pytest.raises(InputError, match=message):
        train_head(changed, tmp_path)
