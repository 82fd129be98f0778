"""Tests of whole training runs of tiny size: their results, and the configs that they refuse."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers.tiny_training import config, records

import spsjax
from spsjax import InputError, NonFiniteError, loading, tokenization
from spsjax.parallel import sharding
from spsjax.training import plots
from spsjax.training.checkpoints import Checkpoints
from spsjax.training.train_draft import distill_draft
from spsjax.training.train_target import train_target

OTHER_TEXTS = [f"{i * 7919} others {i * i}\n" * 9 for i in range(99)]  # for other tokenizers


@pytest.fixture(scope="session")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """The run folder of a target."""
    folder = tmp_path_factory.mktemp("runs") / "target"
    train_target(config("target", texts), folder)
    return folder


@pytest.fixture(scope="session")
def draft(target, texts, tmp_path_factory) -> pathlib.Path:
    """The run folder of a draft of that target."""
    folder = tmp_path_factory.mktemp("runs") / "draft"
    distill_draft(config("draft", texts, target=str(target / "model")), folder)
    return folder


def test_trained_pair_samples_speculatively(target, draft):
    models = [spsjax.load(folder / "model") for folder in (target, draft)]
    out = spsjax.generate(models[0], ["def function"], models[1], 3, max_new_tokens=16)
    assert len(out.tokens[0]) > 0 and out.stats.block_efficiency > 1


def test_target_run_logs_a_falling_loss(target):
    train, held_out = records(target, "train"), records(target, "held_out")
    assert [line["step"] for line in train] == [5, 10, 15, 20, 25, 30]
    assert train[-1]["loss"] < train[0]["loss"] and train[0]["tokens_per_second"] > 0
    assert [line["step"] for line in held_out] == [15, 30]
    assert held_out[1]["loss"]["mean"] < held_out[0]["loss"]["mean"]
    assert held_out[1]["loss"]["interval"] > 0


def test_draft_run_logs_expected_and_counted_acceptance(draft):
    (_, held_out) = records(draft, "held_out")
    assert 0 < held_out["acceptance"]["mean"] < 1
    assert len(held_out["acceptance"]["by_position"]) == 16
    for group in ("temperature_1", "temperature_0"):
        last = records(draft, group)[-1]
        assert last["step"] == 30 and 0 <= last["counted_acceptance"] <= 1
        assert 1 <= last["block_efficiency"] <= 5
        assert last["greedy_agreement"]["interval"] > 0
        assert ("acceptance" in last) == (group == "temperature_1")


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


def test_finished_run_only_writes_its_model(target, texts, monkeypatch):
    """The model is written before the curves, which may fail."""
    log, model = target / "log.jsonl", target / "model" / "model.safetensors"
    before = log.read_text(), model.read_bytes()
    model.unlink()
    monkeypatch.setattr(plots, "plot_curves", None)
    with pytest.raises(TypeError):
        train_target(config("target", texts), target)
    assert (log.read_text(), model.read_bytes()) == before


def test_run_prints_its_model_and_the_path_of_its_config(target, texts, capsys):
    train_target(config("target", texts), target)
    model, stored = capsys.readouterr().out.splitlines()[1:3]
    assert model.startswith("Target: ") and model.endswith(f" parameters, trained on {texts}")
    assert stored == f"The whole config is written to {target / 'config.json'}"


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
    with pytest.raises(InputError, match=r": expected a run to export from, found none$"):
        train_target(config("target", texts), tmp_path / "none", export="best")


def test_run_resumes_with_its_own_config_only(target, texts):
    changed = config("target", texts, seed=1)
    with pytest.raises(InputError, match=rf"^{target}: expected the stored .* seed=0, found 1"):
        train_target(changed, target)
    train_target(config("target", texts, mesh={"data": 2, "model": 1}, keep=5), target)


def test_init_sets_the_first_weights_and_the_shape(target, texts, tmp_path):
    start = spsjax.load(target / "model").params["norm"]["scale"]
    optimization = {"warmup": 1, "learning_rate": 1e-9}
    options = {"init": str(target / "model"), "steps": 2, "optimization": optimization}
    model = train_target(config("target", texts, **options), tmp_path / "run")
    np.testing.assert_allclose(model.params["norm"]["scale"], start, atol=1e-6)
    wrong = config("target", texts, **options)
    wrong.model.num_layers = 3
    message = r"^init: expected a model with num_layers=3 or a divisor of it, found 2 in "
    with pytest.raises(InputError, match=message):
        train_target(wrong, tmp_path / "other")


def test_init_may_have_a_shorter_context(target, texts, tmp_path):
    """No weight depends on rotary positions; those of a table are weights."""
    options = {"init": str(target / "model"), "steps": 2, "optimization": {"warmup": 1}}
    longer = config("target", texts, **options)
    longer.model.update({"max_positions": 96, "rope_theta": 1e5})
    assert train_target(longer, tmp_path / "run").config.rope_theta == 1e5
    wrong = config("target", texts, **options)
    wrong.model.update({"max_positions": 96, "positions": "learned"})
    with pytest.raises(InputError, match=r"^init: expected a model with max_positions=96, found"):
        train_target(wrong, tmp_path / "other")


def test_init_with_a_shallower_model_repeats_its_layers(target, texts, tmp_path):
    start = spsjax.load(target / "model", dtype="float32").params["layers"]
    deeper = config(
        "target",
        texts,
        init=str(target / "model"),
        steps=2,
        optimization={"warmup": 1, "learning_rate": 1e-9},
    )
    deeper.model.num_layers = 4
    layers = train_target(deeper, tmp_path / "run").params["layers"]
    for index in range(4):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-6),
            layers[index],
            start[index % 2],
        )


def test_init_sets_the_tokenizer(target, texts, tmp_path):
    """The texts differ, so that a tokenizer trained on them would differ, too."""
    other = tmp_path / "texts"
    shutil.copytree(texts, other)
    for index in range(40):
        (other / f"more_{index}.txt").write_text(f"while {index}: wait(for_{index}, what)\n" * 9)
    options = {"init": str(target / "model"), "steps": 1, "optimization": {"warmup": 0}}
    model = train_target(config("target", str(other), **options), tmp_path / "run")
    assert model.tokenizer == tokenization.load(target / "model")
    tokenizer = tokenization.train(OTHER_TEXTS, tmp_path / "t", 320)
    wrong = config("target", texts, **options, tokenizer=str(tokenizer.path))
    with pytest.raises(InputError, match=r"^init: expected a model with the tokenizer in "):
        train_target(wrong, tmp_path / "wrong")


def test_init_with_another_tokenizer_than_the_target_is_refused(target, draft, texts, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(draft / "model", folder)
    tokenization.train(OTHER_TEXTS, tmp_path / "t", 320).save(folder)
    wrong = config("draft", texts, target=str(target / "model"), init=str(folder))
    with pytest.raises(InputError, match=r"^init: expected a model with the tokenizer in "):
        distill_draft(wrong, tmp_path / "wrong")


def test_run_with_another_corpus_is_refused(texts, tmp_path):
    other = tmp_path / "texts"
    shutil.copytree(texts, other)
    small = {"steps": 1, "optimization": {"warmup": 0}}
    train_target(config("target", str(other), **small), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "data")
    train_target(config("target", str(other), **small), tmp_path / "run")  # rebuilt, but equal
    shutil.rmtree(tmp_path / "run" / "data")
    (other / "3.txt").write_text("another text\n" * 20)
    with pytest.raises(InputError, match=r": expected the stored .*pinned.corpus='.*, found '"):
        train_target(config("target", str(other), **small), tmp_path / "run")


@pytest.mark.parametrize("mixture", ["target", "draft"])
def test_draft_on_a_mesh_equals_one_device(target, texts, tmp_path, mixture):
    shares = {"corpus": 0.5, mixture: 0.5, "samples": 8, "prompt_length": 8}
    changes = {
        "target": str(target / "model"),
        "steps": 4,
        "eval_every": 4,
        "mixture": shares,
        "length": 64,  # the whole context
        "target_cache": {"store": "top_k" if mixture == "target" else "nothing", "k": 16},
        "optimization": {"warmup": 1, "accumulate": 2},
        "compute": {"remat": True},
    }
    held_out = {}
    for name, mesh in (("one", None), ("mesh", sharding.mesh(2, 4))):
        distill_draft(config("draft", texts, **changes), tmp_path / name, mesh)
        held_out[name] = records(tmp_path / name, "held_out")[-1]
    for metric in ("loss", "acceptance"):
        one, many = (held_out[name][metric]["mean"] for name in ("one", "mesh"))
        assert one == pytest.approx(many, abs=2e-3), metric


BAD_TARGET = [
    ({"data": {"train": ("nosuch",)}}, "nosuch: expected a file, a folder with files, or"),
    ({"data": {"train": ()}}, "train: expected one source or more, found none"),
    ({"steps": 0}, "steps: expected an integer >= 1, found 0"),
    ({"length": 65}, "length: expected at most the context, 64, found 65"),
    ({"length": 0}, "length: expected an integer >= 1, found 0"),
    ({"optimization": {"b1": 1.5}}, "b1: expected a finite number of 0 or more, at most"),
    ({"optimization": {"b2": 1.0}}, "b2: expected a number below 1, found 1"),
    ({"model": {"num_layers": True}}, "num_layers: expected an integer, found True"),
    ({"tokenizer": "a\0b"}, "tokenizer: expected a path, found 'a"),
    ({"data": {"train": ("",)}}, "train, held_out: expected paths, found an empty"),
    ({"model": {"vocab_size": 10**12}}, "vocab_size: expected an integer"),
    ({"eval_every": 0}, "eval_every: expected an integer >= 1, found 0"),
    ({"eval_examples": 0}, "eval_examples: expected an integer >= 1, found 0"),
    ({"batch": 3}, r"batch: expected a multiple of 2 \(accumulate times"),
    ({"keep": 0}, "keep: expected an integer >= 1, found 0"),
    ({"compute": {"dtype": "int8"}}, "dtype: expected a floating-point type"),
    ({"model": {"num_heads": 6, "num_kv_heads": 6}}, "num_heads: expected a multiple of the"),
    ({"model": {"vocab_size": 8}}, "vocab_size: expected a size that fits the texts, found"),
    ({"tokenizer": "nosuch.model"}, "nosuch.model: expected a tokenizer file, found"),
]
BAD_DRAFT = [
    ({"target": "nosuch"}, "'nosuch': expected a model folder or one of"),
    ({"objective": {"name": "kl"}}, "objective: expected cross_entropy or one of"),
    ({"mixture": {"corpus": 0.7}}, "mixture: expected three shares that add up to 1"),
    ({"mixture": {"corpus": 0.0, "draft": 1.0, "prompt_length": 40}}, "mixture.prompt_length"),
    ({"draft_eval": {"prompt_length": 64}}, "draft_eval.prompt_length: expected at most 33, found"),
    (
        {"draft_eval": {"new_tokens": 57}},
        "draft_eval.new_tokens: expected at most 56, in a context",
    ),
    ({"draft_eval": {"num_speculative_tokens": 64}}, "draft_eval.num_speculative_tokens: e"),
    ({"init": "pystdlib/draft"}, "init: expected a model with vocab_size=320, found 4096"),
]
BAD = [("target", *case) for case in BAD_TARGET] + [("draft", *case) for case in BAD_DRAFT]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_config_mistake_is_one_line_and_leaves_no_run(
    target, texts, tmp_path, name, changes, message
):
    options = {"target": str(target / "model")} if name == "draft" else {}
    wrong = config(name, texts, **options)
    wrong.update(changes)
    run = train_target if name == "target" else distill_draft
    with pytest.raises(InputError, match=f"^{message}") as caught:
        run(wrong, tmp_path / "run", sharding.mesh(2, 4))
    assert "\n" not in str(caught.value)
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left <= {"data", "cache", ".lock"}, "nothing that a later command would resume"


@pytest.mark.parametrize("name", ["checkpoints", "curves.png", "log.jsonl", "model/config.json"])
def test_output_of_another_kind_is_refused_before_any_work(texts, tmp_path, name):
    """A file is where a run needs a folder, or a folder where it needs a file."""
    path = tmp_path / name
    path.mkdir(parents=True) if path.suffix else path.touch()
    found = "folder" if path.suffix else "file"
    with pytest.raises(InputError, match=f"{name}: expected .*, found a {found}$"):
        train_target(config("target", texts), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]


def test_folder_can_be_used_after_a_mistake(target, texts, tmp_path):
    wrong = config("target", texts)
    wrong.length = 65
    with pytest.raises(InputError):
        train_target(wrong, tmp_path / "run")
    other = config("target", texts, steps=1, optimization={"warmup": 0})
    other.model.vocab_size = 340
    train_target(other, tmp_path / "run")


def test_run_with_another_target_in_the_folder_is_refused(target, texts, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(target / "model", folder)
    small = {"target": str(folder), "target_cache": {"store": "nothing"}}
    distill_draft(config("draft", texts, **small), tmp_path / "run")
    other = spsjax.load(folder)
    other.params["norm"]["scale"] = other.params["norm"]["scale"] * 1.5
    loading.save(folder, other)
    with pytest.raises(InputError, match=r": expected the stored .*pinned.target='.*, found '"):
        distill_draft(config("draft", texts, **small), tmp_path / "run")


def test_weights_that_are_not_finite_are_not_saved(texts, tmp_path):
    wild = config("target", texts, eval_every=1)
    wild.optimization.update({"learning_rate": 1e29, "warmup": 0})
    with pytest.raises(NonFiniteError, match=r"^step \d+: expected (a )?finite "):
        train_target(wild, tmp_path / "run")
    for step in Checkpoints(tmp_path / "run" / "checkpoints").steps():
        scores = [record["loss"]["mean"] for record in records(tmp_path / "run", "held_out")]
        assert step <= len(scores) and np.isfinite(scores).all()


def test_missing_json_field_is_named(target, texts, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x"}\n')
    with pytest.raises(InputError, match=rf"^{path}:1: expected a field 'text', found content$"):
        train_target(config("target", str(path)), tmp_path / "run")


def test_target_without_a_tokenizer_is_refused(target, texts, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((target / "model" / name).read_bytes())
    with pytest.raises(InputError, match=r": expected a tokenizer beside the weights, found n"):
        distill_draft(config("draft", texts, target=str(folder)), tmp_path / "run")


def test_tokenizer_larger_than_the_model_is_refused(texts, tmp_path):
    path = tmp_path / "tokenizer.model"
    tokenization.train([f"def function_{index}(x): return x\n" for index in range(9)], path, 330)
    with pytest.raises(
        InputError, match=r"^model.vocab_size: expected at least the tokenizer's 330"
    ):
        train_target(config("target", texts, tokenizer=str(path)), tmp_path / "run")
