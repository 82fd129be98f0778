"""Tests of whole trainings of tiny size: results, resuming, exports and what is refused."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers.tiny_training import ONE_STEP, config, records, untrained_target, whole_training

import spsjax
from spsjax import InputError, loading
from spsjax.parallel import sharding
from spsjax.training import fit, plots

# Drafters of the target's features, and the steps that they are trained for.
STEPS = {"eagle": 1, "eagle3": 3, "medusa": 4, "blockwise": 4, "mlp_speculator": 4, "falcon": 2}
STEPS |= {"dflash": 4, "dflash2": 4, "dspark": 4, "mtp": 3}
BLOCKS = {"dflash": 5, "dflash2": 5, "dspark": 4}  # slots of a block, of which four draft
GREEDY = spsjax.SamplingParams(0.0)


@pytest.fixture(scope="module")
def run_of(texts, tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(name) -> pathlib.Path:
        fit.train(small(name, texts, run), base / name)
        return base / name

    return run


def small(name, texts, run_of, evaluated=True, **changes):
    """The config of a target, or of a drafter of the one of `run_of`, and with few evaluations."""
    if name != "target":
        changes = {"target": str(run_of("target") / "model")} | changes
    options = config(name, texts, **changes)
    if name not in ("target", "draft"):
        options.objective.steps = STEPS.get(name, 4)
    if name in BLOCKS:
        options.drafter.update({"num_layers": 1, "block_size": BLOCKS[name]})
        options.objective.anchors = 8
    if name == "dflash2":  # what the target knows after 30 steps is spread over many tokens
        options.drafter.selector_top_k = 128
    if not evaluated:
        options.draft_eval.update({"temperatures": (), "num_speculative_tokens": 1})
    return options


def assert_equal_weights(one: pathlib.Path, other: pathlib.Path) -> None:
    contents = [(folder / "model.safetensors").read_bytes() for folder in (one, other)]
    assert contents[0] == contents[1]


@pytest.mark.training
@pytest.mark.smoke
def test_resumed_target_equals_an_undisturbed_one(texts, tmp_path, monkeypatch):
    """Without its last checkpoint a run resumes from the one before, and ends bit-identical.

    Its corpus is missing, too, and is tokenized again.
    """
    monkeypatch.setattr(plots, "plot_curves", lambda folder: "")  # drawing takes a second
    options = {"steps": 8, "eval_every": 4, "log_every": 1, "model": {"num_layers": 1}}
    options = config("target", texts, **options)
    fit.train(options, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for name in ("checkpoints/step_8", "model", "data"):
        shutil.rmtree(tmp_path / "again" / name)
    fit.train(options, tmp_path / "again")
    assert_equal_weights(tmp_path / "whole" / "model", tmp_path / "again" / "model")
    whole, again = (records(tmp_path / name, "train") for name in ("whole", "again"))
    assert [line["step"] for line in again] == [*range(1, 9)]
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]


@whole_training
def test_run_folder_describes_its_run(run_of, texts):
    folder = run_of("target")
    stored = json.loads((folder / "config.json").read_text())
    assert list(stored.pop("pinned")) == ["corpus"]
    assert stored == json.loads(config("target", texts).to_json())
    (environment, *_) = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["jax"] == jax.__version__ and environment["processes"] == 1
    assert (folder / "data" / "manifest.json").exists()
    assert list(folder.glob("events.out.tfevents.*"))
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    train, held_out = records(folder, "train"), records(folder, "held_out")
    assert [line["step"] for line in train] == [5, 10, 15, 20, 25, 30]
    assert train[-1]["loss"] < train[0]["loss"] and train[0]["tokens_per_second"] > 0
    assert [line["step"] for line in held_out] == [15, 30]
    assert held_out[1]["loss"]["mean"] < held_out[0]["loss"]["mean"]
    assert held_out[1]["loss"]["interval"] > 0


@whole_training
def test_finished_run_only_writes_its_model(run_of, texts, monkeypatch, capsys):
    """Also on another mesh. The model is written before the curves, which may fail."""
    folder = run_of("target")
    log, model = folder / "log.jsonl", folder / "model" / "model.safetensors"
    before = log.read_text(), model.read_bytes()
    model.unlink()
    monkeypatch.setattr(plots, "plot_curves", None)
    with pytest.raises(TypeError):
        fit.train(config("target", texts, mesh={"data": 2, "model": 1}, keep=5), folder)
    assert (log.read_text(), model.read_bytes()) == before
    printed, stored = capsys.readouterr().out.splitlines()[1:3]
    assert printed.startswith("Target: ") and printed.endswith(f" parameters, trained on {texts}")
    assert stored == f"The whole config is written to {folder / 'config.json'}"


@whole_training
def test_export_turns_any_checkpoint_into_the_model(run_of, texts, tmp_path, capsys):
    folder = tmp_path / "target"
    shutil.copytree(run_of("target"), folder)
    final = (folder / "model" / "model.safetensors").read_bytes()
    for export, step in (("15", 15), ("latest", 30), ("best", 30)):
        fit.train(config("target", texts), folder, export=export)
        assert f"checkpoint of step {step}\n" in capsys.readouterr().out
        same = (folder / "model" / "model.safetensors").read_bytes() == final
        assert same == (step == 30)
    for export, message in (("7", ": expected a checkpoint of step 7, found 15, 30"), ("x", "exp")):
        with pytest.raises(InputError, match=message):
            fit.train(config("target", texts), folder, export=export)


@whole_training
def test_draft_logs_acceptance_and_drafts_for_its_target(run_of):
    folder = run_of("draft")
    (_, held_out) = records(folder, "held_out")
    assert 0 < held_out["acceptance"]["mean"] < 1
    assert len(held_out["acceptance"]["by_position"]) == 16
    for group in ("temperature_1", "temperature_0"):
        last = records(folder, group)[-1]
        assert last["step"] == 30 and 0 <= last["counted_acceptance"] <= 1
        assert 1 <= last["block_efficiency"] <= 5
        assert last["greedy_agreement"]["interval"] > 0
        assert ("acceptance" in last) == (group == "temperature_1")
    target, draft = (spsjax.load(run_of(name) / "model") for name in ("target", "draft"))
    out = spsjax.generate(target, ["def function"], draft, 3, max_new_tokens=16)
    assert len(out.tokens[0]) > 0 and out.stats.block_efficiency > 1


@whole_training
def test_draft_on_a_mesh_equals_one_device(texts, tmp_path):
    """On texts of all kinds, of which a cached target needs no pass for two."""
    changes = {
        "steps": 4,
        "eval_every": 4,
        "mixture": {"corpus": 0.25, "target": 0.25, "draft": 0.5, "samples": 8, "prompt_length": 8},
        "length": 64,  # the whole context
        "target_cache": {"store": "top_k", "k": 16},
        "optimization": {"warmup": 1, "accumulate": 2},
        "compute": {"remat": True},
    }
    options = config("draft", texts, untrained_target(texts, tmp_path.parent), **changes)
    held_out = {}
    for name, mesh in (("one", None), ("mesh", sharding.mesh(2, 4))):
        fit.train(options, tmp_path / name, mesh)
        held_out[name] = records(tmp_path / name, "held_out")[-1]
    for metric in ("loss", "acceptance"):
        one, many = (held_out[name][metric]["mean"] for name in ("one", "mesh"))
        assert one == pytest.approx(many, abs=2e-3), metric


@whole_training
def test_run_with_another_target_in_the_folder_is_refused(run_of, texts, tmp_path):
    """A finished run of the same target only writes its model again."""
    target, folder = run_of("target") / "model", tmp_path / "run"
    shutil.copytree(target, tmp_path / "model")
    shutil.copytree(run_of("draft"), folder)
    path = folder / "config.json"
    path.write_text(path.read_text().replace(str(target), str(tmp_path / "model")))
    options = config("draft", texts, tmp_path / "model")
    fit.train(options, folder)
    other = spsjax.load(tmp_path / "model")
    other.params["norm"]["scale"] = other.params["norm"]["scale"] * 1.5
    loading.save(tmp_path / "model", other)
    with pytest.raises(InputError, match=r": expected the stored .*pinned.target='.*, found '"):
        fit.train(options, folder)


def assert_drafts_change_no_greedy_text(model, drafter):
    """Drafts after as many prompts, as long, as an evaluation does, which has compiled it."""
    prompts = np.random.default_rng(0).integers(0, 300, (4, 8)).tolist()
    out, plain = (
        spsjax.generate(model, prompts, each, None, GREEDY, 16, stop_at_eos=False)
        for each in (drafter, None)
    )
    assert all(map(np.array_equal, out.tokens, plain.tokens))


@whole_training
@pytest.mark.parametrize("method", STEPS)
def test_drafter_logs_acceptance_by_depth_and_is_saved(run_of, method):
    first, last = records(run_of(method), "held_out")
    assert last["loss"]["mean"] < first["loss"]["mean"]
    assert last["acceptance"]["mean"] > first["acceptance"]["mean"]
    names = ["acceptance", *(f"acceptance_{depth}" for depth in range(2, 5))]  # K = 4 is deeper
    assert [name for name in last if name.startswith("acceptance")] == names
    assert 1 < records(run_of(method), "temperature_1")[-1]["block_efficiency"] <= 5
    model = spsjax.load(run_of("target") / "model")
    drafter = spsjax.load_drafter(run_of(method) / "drafter", model)
    assert_drafts_change_no_greedy_text(model, drafter)
    assert drafter.drafter.num_speculative_tokens == 4


@whole_training
@pytest.mark.parametrize("method", ["falcon", "blockwise", "dspark", "mtp"])
def test_resumed_drafter_ends_with_the_same_weights(run_of, texts, tmp_path, method):
    """Falcon draws noise and glances, blockwise heads which one a batch trains, DSpark anchors.

    The layer for multi-token prediction has the target's kind.
    """
    shutil.copytree(run_of(method), tmp_path / "run")
    for name in ("checkpoints/step_30", "drafter"):
        shutil.rmtree(tmp_path / "run" / name)
    fit.train(small(method, texts, run_of), tmp_path / "run")
    assert_equal_weights(run_of(method) / "drafter", tmp_path / "run" / "drafter")


@whole_training
def test_training_begins_with_the_weights_of_a_drafter(run_of, texts, tmp_path):
    """With almost no learning rate they stay as they are."""
    init = str(run_of("eagle3") / "drafter")
    options = small("eagle3", texts, run_of, evaluated=False, init=init, **ONE_STEP)
    params = fit.train(options, tmp_path).params
    target = spsjax.load(run_of("target") / "model")
    expected = spsjax.load_drafter(init, target).params
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), params, expected)


@whole_training
def test_head_of_the_targets_folder_is_fine_tuned(run_of, texts, tmp_path):
    """With almost no learning rate it stays as it is. It begins in the target's own folder."""
    folder = tmp_path / "model"
    shutil.copytree(run_of("target") / "model", folder)
    target = spsjax.load(folder)
    head = spsjax.load_drafter(run_of("mtp") / "drafter", target)
    spsjax.save_drafter(folder, head, target)
    options = small("mtp", texts, run_of, evaluated=False, init="mtp", **ONE_STEP)
    options.target = str(folder)
    params = fit.train(options, tmp_path / "run").params
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), params, head.params)


@whole_training
def test_medusa_2_trains_the_target_too(run_of, texts, tmp_path):
    """The drafter belongs to the new target, which is near the old one."""
    init = str(run_of("medusa") / "drafter")
    fit.train(small("medusa2", texts, run_of, evaluated=False, init=init), tmp_path)
    old, new = (spsjax.load(run / "model") for run in (run_of("target"), tmp_path))
    moved = jax.tree.map(lambda a, b: np.abs(np.subtract(a, b)).max(), old.params, new.params)
    assert all(change > 0 for change in jax.tree.leaves(moved)), moved
    last, before = (records(run, "held_out")[-1] for run in (tmp_path, run_of("medusa")))
    assert 0 < last["target_divergence"]["mean"] < 0.1
    assert last["acceptance"]["mean"] > before["acceptance"]["mean"]
    drafter = spsjax.load_drafter(tmp_path / "drafter", new)
    assert_drafts_change_no_greedy_text(new, drafter)


@whole_training
def test_cached_features_train_like_a_running_target(run_of, texts, tmp_path):
    """Features are stored in float16, drafters in bfloat16."""
    cached = {"target_cache": {"store": "states"}}
    head = fit.train(small("eagle3", texts, run_of, evaluated=False, **cached), tmp_path)
    target = spsjax.load(run_of("target") / "model")
    expected = spsjax.load_drafter(run_of("eagle3") / "drafter", target).params
    for name in ("fc", "layer"):
        for one, other in zip(jax.tree.leaves(head.params[name]), jax.tree.leaves(expected[name])):
            np.testing.assert_allclose(one, other.astype("float32"), atol=0.05)


@whole_training
@pytest.mark.parametrize("method", ["eagle3", "dflash2"])
def test_drafter_on_a_mesh_equals_one_device(run_of, texts, tmp_path, method):
    """On texts of the corpus and of the target."""
    target = str(untrained_target(texts, tmp_path.parent))
    options = small(method, texts, run_of, evaluated=False, target=target)
    options.objective.steps = 2
    options.mixture.update({"corpus": 0.5, "target": 0.5, "samples": 8, "prompt_length": 4})
    alone = fit.train(options, tmp_path / "alone")
    options.mesh.update({"data": 2, "model": 4, "replicate": False})
    head = fit.train(options, tmp_path / "mesh", sharding.mesh(2, 4))
    layer = head.params["layer"] if method == "eagle3" else head.params["layers"][0]
    assert not layer["ffn"]["up"]["kernel"].is_fully_replicated
    for one, other in zip(*map(jax.tree.leaves, (head.params, alone.params))):
        np.testing.assert_allclose(one, other, atol=1e-3)
    train = records(tmp_path / "mesh", "train")
    assert train[-1]["loss"] < train[0]["loss"]
