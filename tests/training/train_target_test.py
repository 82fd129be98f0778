"""Tests of whole trainings of a target, of tiny size: results, resuming, exports and inits."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers.tiny_training import ONE_STEP, config, records, target_run, whole_training

import spsjax
from spsjax import InputError, NonFiniteError, tokenization
from spsjax.training import plots
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.train_target import train_target


@pytest.fixture(scope="module")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """The run folder of a target."""
    return target_run(texts, tmp_path_factory.getbasetemp())


@pytest.mark.training
@pytest.mark.smoke
def test_resumed_target_equals_an_undisturbed_one(texts, tmp_path, monkeypatch):
    """Without its last checkpoint a run resumes from the one before, and ends bit-identical.

    Its corpus is missing, too, and is tokenized again.
    """
    monkeypatch.setattr(plots, "plot_curves", lambda folder: "")  # drawing takes a second
    small = {"steps": 8, "eval_every": 4, "log_every": 1}
    small = config("target", texts, **small, model={"num_layers": 1})
    train_target(small, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_8")
    for name in ("model", "data"):
        shutil.rmtree(tmp_path / "again" / name)
    train_target(small, tmp_path / "again")
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    whole, again = (records(tmp_path / name, "train") for name in ("whole", "again"))
    assert [line["step"] for line in again] == [*range(1, 9)]
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]


@whole_training
def test_target_run_logs_a_falling_loss(target):
    train, held_out = records(target, "train"), records(target, "held_out")
    assert [line["step"] for line in train] == [5, 10, 15, 20, 25, 30]
    assert train[-1]["loss"] < train[0]["loss"] and train[0]["tokens_per_second"] > 0
    assert [line["step"] for line in held_out] == [15, 30]
    assert held_out[1]["loss"]["mean"] < held_out[0]["loss"]["mean"]
    assert held_out[1]["loss"]["interval"] > 0


@whole_training
def test_run_folder_describes_its_run(target, texts):
    stored = json.loads((target / "config.json").read_text())
    assert list(stored.pop("pinned")) == ["corpus"]
    assert stored == json.loads(config("target", texts).to_json())
    (environment, *_) = json.loads((target / "environment.json").read_text())
    assert environment["packages"]["jax"] == jax.__version__ and environment["processes"] == 1
    assert (target / "data" / "manifest.json").exists()
    assert list(target.glob("events.out.tfevents.*"))
    assert (target / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (target / "model" / "config.json").exists()


@whole_training
def test_finished_run_only_writes_its_model(target, texts, monkeypatch, capsys):
    """The model is written before the curves, which may fail."""
    log, model = target / "log.jsonl", target / "model" / "model.safetensors"
    before = log.read_text(), model.read_bytes()
    model.unlink()
    monkeypatch.setattr(plots, "plot_curves", None)
    with pytest.raises(TypeError):
        train_target(config("target", texts), target)
    assert (log.read_text(), model.read_bytes()) == before
    printed, stored = capsys.readouterr().out.splitlines()[1:3]
    assert printed.startswith("Target: ") and printed.endswith(f" parameters, trained on {texts}")
    assert stored == f"The whole config is written to {target / 'config.json'}"


@whole_training
def test_export_turns_any_checkpoint_into_the_model(target, texts, tmp_path, capsys):
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    final = (folder / "model" / "model.safetensors").read_bytes()
    for export, step in (("15", 15), ("latest", 30), ("best", 30)):
        train_target(config("target", texts), folder, export=export)
        assert f"checkpoint of step {step}\n" in capsys.readouterr().out
        same = (folder / "model" / "model.safetensors").read_bytes() == final
        assert same == (step == 30)
    for export, message in (
        ("7", r": expected a checkpoint of step 7, found 15, 30"),
        ("x", "exp"),
    ):
        with pytest.raises(InputError, match=message):
            train_target(config("target", texts), folder, export=export)


@whole_training
def test_run_resumes_with_its_own_config_only(target, texts):
    changed = config("target", texts, seed=1)
    with pytest.raises(InputError, match=rf"^{target}: expected the stored .* seed=0, found 1"):
        train_target(changed, target)
    train_target(config("target", texts, mesh={"data": 2, "model": 1}, keep=5), target)


@whole_training
def test_training_begins_with_weights_and_tokenizer_of_init(target, texts, tmp_path):
    """Of a shallower model with a shorter context, on texts whose own tokenizer would differ."""
    start = spsjax.load(target / "model", dtype="float32").params
    other = tmp_path / "texts"
    shutil.copytree(texts, other)
    for index in range(40):
        (other / f"more_{index}.txt").write_text(f"while {index}: wait(for_{index}, what)\n" * 9)
    deeper = config("target", str(other), init=str(target / "model"), **ONE_STEP)
    deeper.model.update({"num_layers": 4, "max_positions": 96, "rope_theta": 1e5})
    model = train_target(deeper, tmp_path / "run")
    assert model.config.rope_theta == 1e5
    assert model.tokenizer == tokenization.load(target / "model")
    np.testing.assert_allclose(model.params["norm"]["scale"], start["norm"]["scale"], atol=1e-6)
    for index in range(4):
        pairs = model.params["layers"][index], start["layers"][index % 2]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *pairs)


@whole_training
def test_weights_that_are_not_finite_are_not_saved(texts, tmp_path):
    wild = config("target", texts, eval_every=1)
    wild.optimization.update({"learning_rate": 1e29, "warmup": 0})
    with pytest.raises(NonFiniteError, match=r"^step \d+: expected (a )?finite "):
        train_target(wild, tmp_path / "run")
    for step in Checkpoints(tmp_path / "run" / "checkpoints").steps():
        scores = [record["loss"]["mean"] for record in records(tmp_path / "run", "held_out")]
        assert step <= len(scores) and np.isfinite(scores).all()
