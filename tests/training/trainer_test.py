"""Tests of what a run checks and prepares before its first step. None of them trains."""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers.tiny_training import ONE_STEP, config, head_config, untrained_target

import spsjax
from spsjax import InputError, tokenization
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import step as train_step
from spsjax.training.train_draft import distill_draft
from spsjax.training.train_head import train_head
from spsjax.training.train_target import train_target
from spsjax.training.trainer import Trainer

OTHER_TEXTS = [f"{i * 7919} others {i * i}\n" * 9 for i in range(99)]  # for other tokenizers


@pytest.fixture(scope="module")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """The model folder of a target."""
    return untrained_target(texts, tmp_path_factory.getbasetemp())


def initial(texts, folder, workdir, **shape):
    """Returns the trainer of a target that begins with a model, the target, and its weights."""
    options = config("target", texts, init=str(folder))
    options.model.update(shape)
    trainer, model = Trainer(options, workdir), transformer.Config(**options.model)
    trainer.check_model(model)
    params = trainer.init_model(model, train_step.model_shapes(model, None))
    return trainer, model, params


def test_init_sets_the_first_weights(target, texts, tmp_path):
    _, _, params = initial(texts, target, tmp_path)
    expected = spsjax.load(target, dtype="float32").params
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_init_of_another_shape_is_refused(target, texts, tmp_path):
    wrong = config("target", texts, init=str(target))
    wrong.model.num_layers = 3
    message = r"^init: expected a model with num_layers=3 or a divisor of it, found 2 in "
    with pytest.raises(InputError, match=message):
        train_target(wrong, tmp_path)


def test_init_may_have_a_shorter_context(target, texts, tmp_path):
    """No weight depends on rotary positions; those of a table are weights."""
    longer = {"max_positions": 96, "rope_theta": 1e5}
    _, model, params = initial(texts, target, tmp_path, **longer)
    assert jax.tree.structure(params) == jax.tree.structure(transformer.param_shapes(model))
    wrong = config("target", texts, init=str(target))
    wrong.model.update({"max_positions": 96, "positions": "learned"})
    with pytest.raises(InputError, match=r"^init: expected a model with max_positions=96, found"):
        train_target(wrong, tmp_path)


def test_init_with_a_shallower_model_repeats_its_layers(target, texts, tmp_path):
    _, _, params = initial(texts, target, tmp_path, num_layers=4)
    start = spsjax.load(target, dtype="float32").params["layers"]
    assert len(params["layers"]) == 4
    for index in range(4):
        jax.tree.map(np.testing.assert_array_equal, params["layers"][index], start[index % 2])


def test_init_sets_the_tokenizer(target, texts, tmp_path):
    """Another one, of the config or of a draft's target, is refused."""
    trainer, *_ = initial(texts, target, tmp_path)
    assert trainer.choose_tokenizer(None) == tokenization.load(target)
    other = tokenization.train(OTHER_TEXTS, tmp_path / "t", 320)
    wrong = config("target", texts, init=str(target), tokenizer=str(other.path))
    with pytest.raises(InputError, match=r"^init: expected a model with the tokenizer in "):
        train_target(wrong, tmp_path / "wrong")
    folder = tmp_path / "draft"
    shutil.copytree(target, folder)
    other.save(folder)
    wrong = config("draft", texts, target=str(target), init=str(folder))
    wrong.model.num_layers = 2
    with pytest.raises(InputError, match=r"^init: expected a model with the tokenizer in "):
        distill_draft(wrong, tmp_path / "wrong")


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
BAD_HEAD = [
    ({"mixture": {"draft": 1.0}}, "mixture"),
    ({"target_cache": {"store": "top_k"}}, "target_cache.store: expected 'nothing' or 'states'"),
    ({"objective": {"every": 99}}, "objective.every: expected at most the length, found 99"),
    ({"objective": {"steps": 40}}, "length: expected above objective.steps and .*, 40, by 2"),
    ({"drafter": {"tap_layers": (0, 9)}}, r"tap_layers: expected layers in \[0, 2\]"),
    ({"drafter": {"vocab_size": 999}}, "vocab_size: expected at most the target's 320"),
    (
        {"mixture": {"corpus": 0.5, "target": 0.5, "prompt_length": 32}},
        r"mixture\.prompt_length: expected less",
    ),
    (
        {"draft_eval": {"prompt_length": 2, "new_tokens": 1}},
        r"draft_eval\.new_tokens: expected texts of more",
    ),
    ({"init": "ngram"}, "init: expected a drafter of the shape in the config's section drafter"),
    (
        {"objective": {"target": 1.0}, "target_cache": {"store": "states"}},
        "target_cache.store: expected 'nothing', as the target is trained, too",
    ),
]
BAD = [
    (name, *case)
    for name, cases in (("target", BAD_TARGET), ("draft", BAD_DRAFT), ("eagle3", BAD_HEAD))
    for case in cases
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_config_mistake_is_one_line_and_leaves_no_run(
    target, texts, tmp_path, name, changes, message
):
    if name == "eagle3":
        train, wrong = train_head, head_config(name, texts, target)
    else:
        train = train_target if name == "target" else distill_draft
        wrong = config(name, texts, **{"target": str(target)} if name == "draft" else {})
    wrong.update(changes)
    with pytest.raises(InputError, match=f"^{message}") as caught:
        train(wrong, tmp_path / "run", sharding.mesh(2, 4))
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


def test_folder_can_be_used_after_a_mistake(texts, tmp_path):
    """Also after one that shows only once the corpus is there, which is then replaced."""
    wrong = config("target", texts)
    wrong.length = 65
    with pytest.raises(InputError, match="length"):
        train_target(wrong, tmp_path / "run")
    large = tokenization.train(OTHER_TEXTS, tmp_path / "large.model", 330)
    wrong = config("target", texts, tokenizer=str(large.path))
    with pytest.raises(
        InputError, match=r"^model.vocab_size: expected at least the tokenizer's 330"
    ):
        train_target(wrong, tmp_path / "run")
    other = config("target", texts, **ONE_STEP)
    other.model.vocab_size = 310
    trainer = Trainer(other, tmp_path / "run")
    assert not trainer.folder.resumable
    assert trainer.prepare_corpus(None, 310).tokenizer.vocab_size == 310


def test_run_with_another_corpus_is_refused(texts, tmp_path):
    """Texts that are tokenized again are the same corpus, and a changed text is another one."""
    other, folder = tmp_path / "texts", tmp_path / "run"
    shutil.copytree(texts, other)
    small = config("target", str(other))
    for _ in range(2):
        trainer = Trainer(small, folder)
        trainer.folder.pin(corpus=trainer.prepare_corpus(None, 320).fingerprint)
        trainer.folder.begin(0)
        shutil.rmtree(folder / "data")
    (other / "3.txt").write_text("another text\n" * 20)
    with pytest.raises(InputError, match=r": expected the stored .*pinned.corpus='.*, found '"):
        train_target(small, folder)


def test_export_without_a_run_is_refused(texts, tmp_path):
    with pytest.raises(InputError, match=r": expected a run to export from, found none$"):
        train_target(config("target", texts), tmp_path / "none", export="best")


def test_missing_json_field_is_named(texts, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x"}\n')
    with pytest.raises(InputError, match=rf"^{path}:1: expected a field 'text', found content$"):
        train_target(config("target", str(path)), tmp_path / "run")


def test_target_without_a_tokenizer_is_refused(target, texts, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(target / name, folder)
    for train, wrong in (
        (distill_draft, config("draft", texts, target=str(folder))),
        (train_head, head_config("eagle", texts, folder)),
    ):
        with pytest.raises(InputError, match=r": expected a tokenizer beside the weights, found n"):
            train(wrong, tmp_path / "run")
