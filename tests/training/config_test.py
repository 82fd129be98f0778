"""Tests of what a run checks and prepares before its first step. None of them trains."""

import math
import pathlib
import runpy
import shutil

import jax
import numpy as np
import pytest
from helpers.environment import ROOT
from helpers.tiny_training import config, untrained_target

import spsjax
from spsjax import InputError, tokenization
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import config as configs
from spsjax.training import fit
from spsjax.training import step as train_step
from spsjax.training.run import Run
from spsjax.training.tasks import base

NAN = math.nan
OTHER_TEXTS = [f"{i * 7919} others {i * i}\n" * 9 for i in range(99)]  # for other tokenizers
FILES = sorted(
    path
    for path in (*ROOT.glob("configs/experiments/*.py"), *ROOT.glob("configs/drafters/*.py"))
    if "spsjax.training" in path.read_text() and path.stem not in ("gpt2_xl", "stop_rule")
)


@pytest.fixture(scope="module")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """The model folder of a target."""
    return untrained_target(texts, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_config_is_valid(path):
    options = runpy.run_path(str(path))["get_config"]()
    task = fit.task_class(options)
    tree = configs.read(task.config_class, options.to_dict())
    devices = tree.mesh.data, tree.mesh.model
    mesh = jax.sharding.AbstractMesh(devices, ("data", "model"))
    train_step.check_batch(tree.batch, tree.optimization.accumulate, mesh)
    if "model" in options:
        shared = {"vocab_size": 32_000, "max_positions": 2048} | tree.model
        shape = base.build_model(shared)
        assert tree.length <= shape.max_positions
        for field in ("num_heads", "d_ff"):
            assert getattr(shape, field) % tree.mesh.model == 0
    if path.stem == "chinchilla_target":  # 1.4T tokens
        assert tree.steps * tree.batch * tree.length == pytest.approx(1.4e12, rel=0.01)


def initial(texts, folder, **shape):
    options = config("target", texts, init=str(folder))
    options.model.update(shape)
    task, _, _ = fit.prepare(options, "unused")
    task.shapes = train_step.model_shapes(task.model, None)
    return task, task.init()


def test_init_sets_the_tokenizer_and_repeats_the_layers_of_a_shallower_model(target, texts):
    """Its context may be shorter: no weight depends on rotary positions."""
    start = spsjax.load(target, dtype="float32").params
    task, params = initial(texts, target)
    jax.tree.map(np.testing.assert_array_equal, params, start)
    assert task.tokenizer == tokenization.load(target)
    task, params = initial(texts, target, num_layers=4, max_positions=96, rope_theta=1e5)
    assert jax.tree.structure(params) == jax.tree.structure(transformer.param_shapes(task.model))
    for index in range(4):
        layer = start["layers"][index % 2]
        jax.tree.map(np.testing.assert_array_equal, params["layers"][index], layer)
    for shape, message in (
        ({"num_layers": 3}, "num_layers=3 or a divisor of it, found 2 in "),
        ({"max_positions": 96, "positions": "learned"}, "max_positions=96, found"),
    ):
        with pytest.raises(InputError, match=f"^init: expected a model with {message}"):
            initial(texts, target, **shape)


def test_init_with_another_tokenizer_is_refused(target, texts, tmp_path):
    """Another one than that of the config, or of a draft's target."""
    other = tokenization.train(OTHER_TEXTS, tmp_path / "t", 320)
    wrong = config("target", texts, init=str(target), tokenizer=str(other.path))
    shutil.copytree(target, tmp_path / "draft")
    other.save(tmp_path / "draft")
    draft = config("draft", texts, target, init=str(tmp_path / "draft"), model={"num_layers": 2})
    for options in (wrong, draft):
        with pytest.raises(InputError, match=r"^init: expected a model with the tokenizer in "):
            fit.prepare(options, tmp_path / "run")


BAD_TARGET = [
    ({"data": {"train": ()}}, "data.train: expected one source or more, found none"),
    ({"data": {"train": ("",)}}, "data.train, data.held_out: expected paths, found an empty"),
    ({"steps": 0}, "steps: expected an integer >= 1, found 0"),
    ({"length": 65}, "length: expected at most the context, 64, found 65"),
    ({"optimization": {"b2": 1.0}}, "optimization.b2: expected a number below 1, found 1"),
    ({"optimization": {"learning_rate": NAN}}, "optimization.learning_rate: expected .*, found na"),
    ({"optimization": {"warmup": 30}}, "optimization.warmup: expected fewer than steps=30, fo"),
    ({"optimization": {"wormup": 1}}, "optimization.wormup: .* Did you mean optimization.warmup?"),
    ({"model": {"num_layers": True}}, "model.num_layers: expected an integer, found True"),
    ({"tokenizer": "a\0b"}, "tokenizer: expected a path, found 'a"),
    ({"tokenizer": "nosuch.model"}, "nosuch.model: expected a tokenizer file, found"),
    ({"batch": 3}, r"batch: expected a multiple of 2 \(accumulate times"),
    ({"compute": {"dtype": "int8"}}, "compute.dtype: expected a floating-point type"),
    ({"model": {"num_heads": 6, "num_kv_heads": 6}}, "model.num_heads: expected a multiple of the"),
    ({"mesh": {"data": 0}}, "mesh.data: expected an integer >= 1, found 0"),
    ({"unknown": 1}, "unknown: expected a key of the config, found no such key"),
]
BAD_DRAFT = [
    ({"target": "nosuch"}, "'nosuch': expected a model folder, a GGUF file or one of"),
    ({"objective": {"name": "kl"}}, "objective.name: expected cross_entropy or one of"),
    ({"mixture": {"corpus": 0.7}}, "mixture.corpus, mixture.target, mixture.draft: expected sha"),
    ({"mixture": {"corpus": 0.0, "draft": 1.0, "prompt_length": 40}}, "mixture.prompt_length"),
    ({"objective": {"temperatures": ()}}, "objective.temperatures: expected one or more numbers"),
    ({"objective": {"temperatures": (0.0,)}}, "objective.temperatures: expected a finite number"),
    ({"target_cache": {"store": "logits"}}, "target_cache.store: expected 'nothing', 'states'"),
    ({"draft_eval": {"prompt_length": 64}}, "draft_eval.prompt_length: expected at most 33, found"),
    ({"draft_eval": {"new_tokens": 57}}, "draft_eval.new_tokens: expected at most 56, in a cont"),
    ({"init": "pystdlib/draft"}, "init: expected a model with vocab_size=320, found 4096"),
]
BAD_FEATURES = [
    ({"mixture": {"corpus": 0.0, "draft": 1.0, "prompt_length": 9}}, "mixture.draft: expected 0, "),
    ({"target_cache": {"store": "top_k"}}, "target_cache.store: expected 'nothing' or 'states'"),
    ({"objective": {"every": 99}}, "objective.every: expected at most the length, found 99"),
    ({"objective": {"anchors": 99}}, "objective.anchors: expected at most the length, found 99"),
    ({"objective": {"anchors": 9, "every": 2}}, "objective.anchors, objective.pace: expected 0 wi"),
    ({"objective": {"pace": 0.5, "one": True}}, "objective.anchors, objective.pace: expected 0 wi"),
    ({"objective": {"pace": 1.5}}, "objective.pace: expected a finite number"),
    ({"objective": {"steps": 40}}, "length: expected above objective.steps and .*, 40, by 2"),
    ({"objective": {"divergence": "l2"}}, "objective.divergence: expected best_token or one"),
    ({"drafter": {"tap_layers": (0, 9)}}, r"drafter.tap_layers: expected layers in \[0, 2\]"),
    ({"drafter": {"vocab_size": 999}}, "drafter.vocab_size: expected at most the target's 320"),
    ({"drafter": {"method": "nosuch"}}, "drafter.method: expected .*eagle3, .*, found 'nosuch'"),
    ({"draft_eval": {"prompt_length": 2, "new_tokens": 1}}, "draft_eval.new_tokens: expected tex"),
    ({"init": "ngram"}, "init: expected a drafter of the shape in the config's section drafter"),
    ({"objective": {"target": 1.0}, "target_cache": {"store": "states"}}, "target_cache.store: ex"),
]
KINDS = {"target": BAD_TARGET, "draft": BAD_DRAFT, "eagle3": BAD_FEATURES}


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *case) for name in KINDS for case in KINDS[name]]
)
def test_config_mistake_names_the_whole_key(target, texts, tmp_path, name, changes, message):
    wrong = config(name, texts, **{"target": target} | changes)
    with pytest.raises(InputError, match=f"^{message}") as caught:
        fit.prepare(wrong, tmp_path / "run", sharding.mesh(2, 4))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_config_of_no_task_and_export_without_a_run_are_refused(texts, tmp_path):
    wrong = configs.ConfigDict({"steps": 3})
    with pytest.raises(InputError, match=r"^config: expected a section drafter or objective or"):
        fit.train(wrong, tmp_path)
    with pytest.raises(InputError, match=r": expected a run to export from, found none$"):
        fit.train(config("target", texts), tmp_path / "none", export="best")


@pytest.mark.parametrize("name", ["checkpoints", "curves.png", "log.jsonl", "model/config.json"])
def test_output_of_another_kind_is_refused_before_any_work(texts, tmp_path, name):
    path = tmp_path / name
    path.mkdir(parents=True) if path.suffix else path.touch()
    kind = "folder" if path.suffix else "file"
    with pytest.raises(InputError, match=f"{name}: expected .*, found a {kind}$"):
        fit.train(config("target", texts), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]


def run_of(options, folder) -> Run:
    task, tree, run_folder = fit.prepare(options, folder)
    return Run(tree, run_folder, None, task.tokenizer, task.vocab_size)


def test_folder_can_be_used_after_a_mistake(texts, tmp_path):
    """Also after one that shows only once the corpus is there, which is then replaced."""
    large = tokenization.train(OTHER_TEXTS, tmp_path / "large.model", 330)
    for changes, message in (
        ({"data": {"train": ("nosuch",)}}, "nosuch: expected a file, a folder with files, or"),
        ({"model": {"vocab_size": 10**12}}, "vocab_size: expected an integer"),
        ({"model": {"vocab_size": 8}}, "vocab_size: expected a size that fits the texts, found"),
        ({"tokenizer": str(large.path)}, "model.vocab_size: expected at least the tokenizer's 330"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            fit.train(config("target", texts, **changes), tmp_path / "run")
    run = run_of(config("target", texts, model={"vocab_size": 310}), tmp_path / "run")
    assert not run.folder.resumable and run.tokenizer.vocab_size == 310


def test_run_with_another_corpus_is_refused(texts, tmp_path):
    other, folder = tmp_path / "texts", tmp_path / "run"
    shutil.copytree(texts, other)
    options = config("target", str(other))
    for _ in range(2):
        run = run_of(options, folder)
        run.folder.pin(corpus=run.fingerprint)
        run.folder.begin(0)
        shutil.rmtree(folder / "data")
    (other / "3.txt").write_text("another text\n" * 20)
    with pytest.raises(InputError, match=r": expected the stored .*pinned.corpus='.*, found '"):
        fit.train(options, folder)


def test_target_without_a_tokenizer_is_refused(target, texts, tmp_path):
    folder = shutil.copytree(target, tmp_path / "model", ignore=lambda *_: ["tokenizer.model"])
    for name in ("draft", "eagle"):
        with pytest.raises(InputError, match=r": expected a tokenizer beside the weights, found n"):
            fit.prepare(config(name, texts, folder), tmp_path / "run")
