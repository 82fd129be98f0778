"""Whole trainings on tiny sizes: what they leave behind, and what they refuse before they begin."""

import json
import pathlib
import runpy
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

import spsjax
from spsjax import InputError, NonFiniteError, loading, tokenization
from spsjax.parallel import sharding
from spsjax.training import recipes, run_folder
from spsjax.training.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).parent.parent
SHAPE = {"d_model": 32, "d_ff": 32, "num_heads": 8, "num_kv_heads": 4, "head_dim": 4}
SMALL = {
    "length": 32, "batch": 4, "steps": 30, "eval_every": 15, "eval_examples": 8, "log_every": 5,
    "optimization": {"warmup": 3, "learning_rate": 1e-2},
}  # fmt: skip


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> str:
    """A folder of 40 texts."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(40):
        lines = [f"    total = total + {index} * {line}\n" for line in range(12)]
        (folder / f"{index}.txt").write_text(f"def function_{index}(total):\n{''.join(lines)}")
    return str(folder)


def config(name, texts, **changes):
    found = runpy.run_path(str(ROOT / "configs" / "experiments" / f"pystdlib_{name}.py"))
    found = found["get_config"]()
    found.update(SMALL | {"data": {"train": (texts,)}})
    if name == "target":
        found.model.update(SHAPE | {"num_layers": 2, "vocab_size": 320, "max_positions": 64})
    else:
        found.model.update(SHAPE)
        found.trial.update({"prompts": 4, "prompt_length": 8, "new_tokens": 16})
    found.update(changes)
    return found


@pytest.fixture(scope="session")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """The run of a target."""
    folder = tmp_path_factory.mktemp("runs") / "target"
    recipes.target(config("target", texts), folder)
    return folder


@pytest.fixture(scope="session")
def draft(target, texts, tmp_path_factory) -> pathlib.Path:
    """The run of its draft."""
    folder = tmp_path_factory.mktemp("runs") / "draft"
    recipes.draft(config("draft", texts, target=str(target / "model")), folder)
    return folder


def records(folder, group):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["group"] == group]


def test_a_pair_from_a_folder_of_text_speculates(target, draft):
    models = [spsjax.load(folder / "model") for folder in (target, draft)]
    out = spsjax.generate(models[0], ["def function"], models[1], 3, max_new_tokens=16)
    assert len(out.tokens[0]) > 0 and out.stats.block_efficiency > 1


def test_a_target_learns_and_logs_it(target):
    train, held_out = records(target, "train"), records(target, "held_out")
    assert [line["step"] for line in train] == [5, 10, 15, 20, 25, 30]
    assert train[-1]["loss"] < train[0]["loss"] and train[0]["tokens_per_second"] > 0
    assert [line["step"] for line in held_out] == [15, 30]
    assert held_out[1]["loss"]["mean"] < held_out[0]["loss"]["mean"]
    assert held_out[1]["loss"]["interval"] > 0


def test_a_draft_s_acceptance_is_logged_exactly_and_as_counted(draft):
    (_, held_out) = records(draft, "held_out")
    assert (
        0 < held_out["acceptance"]["mean"] < 1 and len(held_out["acceptance"]["by_position"]) == 16
    )
    for group in ("temperature_1", "temperature_0"):
        last = records(draft, group)[-1]
        assert last["step"] == 30 and 0 <= last["counted"] <= 1
        assert 1 <= last["block_efficiency"] <= 5
        assert last["greedy_agreement"]["interval"] > 0
        assert ("acceptance" in last) == (group == "temperature_1")


def test_a_run_folder_holds_what_made_it(target, texts):
    known = json.loads((target / "config.json").read_text())
    assert list(known.pop("pinned")) == ["corpus"]
    assert known == json.loads(config("target", texts).to_json())
    (environment, *_) = json.loads((target / "environment.json").read_text())
    assert environment["packages"]["jax"] == jax.__version__ and environment["processes"] == 1
    assert (target / "data" / "manifest.json").exists()
    assert (target / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (target / "model" / "config.json").exists()


def test_tensorboard_sees_what_the_log_says(draft):
    (path,) = draft.glob("events.out.tfevents.*")
    content, found = path.read_bytes(), {}
    while content:  # a record: its length, a checksum, the event, a checksum
        size = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + size])
        content = content[16 + size :]
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
    (_, held_out) = records(draft, "held_out")
    assert found["held_out/acceptance", 30] == pytest.approx(held_out["acceptance"]["mean"])
    assert found["train/loss", 30] == pytest.approx(records(draft, "train")[-1]["loss"])


def test_a_finished_run_is_not_trained_again_but_gives_its_model(target, texts):
    log, model = target / "log.jsonl", target / "model" / "model.safetensors"
    before = log.read_text(), model.read_bytes()
    model.unlink()
    recipes.target(config("target", texts), target)
    assert (log.read_text(), model.read_bytes()) == before


def test_any_checkpoint_can_be_made_the_model(target, texts, tmp_path, capsys):
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    final = (folder / "model" / "model.safetensors").read_bytes()
    for export, step in (("15", 15), ("latest", 30), ("best", 30)):
        recipes.target(config("target", texts), folder, export=export)
        assert f"checkpoint of step {step}\n" in capsys.readouterr().out
        same = (folder / "model" / "model.safetensors").read_bytes() == final
        assert same == (step == 30)
    for export, message in (
        ("7", r": expected a checkpoint of step 7, found 15, 30"),
        ("x", "exp"),
    ):
        with pytest.raises(InputError, match=message):
            recipes.target(config("target", texts), folder, export=export)
    with pytest.raises(InputError, match=r": expected a run to export from, found none$"):
        recipes.target(config("target", texts), tmp_path / "none", export="best")


def test_a_run_goes_on_with_its_own_config_only(target, texts):
    changed = config("target", texts, seed=1)
    with pytest.raises(InputError, match=rf"^{target}: expected the config .* seed=0, found 1$"):
        recipes.target(changed, target)
    recipes.target(config("target", texts, mesh={"data": 2, "model": 1}, keep=5), target)


def test_a_run_begins_with_a_folder_s_weights_and_shape(target, texts, tmp_path):
    start = spsjax.load(target / "model").params["norm"]["scale"]
    options = {
        "init": str(target / "model"), "steps": 2,
        "optimization": {"warmup": 1, "learning_rate": 1e-9},
    }  # fmt: skip
    model = recipes.target(config("target", texts, **options), tmp_path / "run")
    np.testing.assert_allclose(model.params["norm"]["scale"], start, atol=1e-6)
    wrong = config("target", texts, **options)
    wrong.model.num_layers = 3
    with pytest.raises(InputError, match=r"^init: expected a model with num_layers=3, found 2 in "):
        recipes.target(wrong, tmp_path / "other")


def test_a_model_that_is_trained_on_keeps_its_tokenizer(target, texts, tmp_path):
    other = tmp_path / "texts"
    shutil.copytree(texts, other)
    for index in range(40):  # from which other pieces would be learned
        (other / f"more_{index}.txt").write_text(f"while {index}: wait(for_{index}, what)\n" * 9)
    options = {"init": str(target / "model"), "steps": 1, "optimization": {"warmup": 0}}
    model = recipes.target(config("target", str(other), **options), tmp_path / "run")
    assert model.tokenizer == tokenization.load(target / "model")
    stranger = tokenization.train(
        [f"{i * 7919} others {i * i}\n" * 9 for i in range(99)], tmp_path / "t", 320
    )
    wrong = config("target", texts, **options, tokenizer=str(stranger.path))
    with pytest.raises(InputError, match=r"^init: expected a model with the tokenizer in "):
        recipes.target(wrong, tmp_path / "wrong")


def test_a_draft_begins_with_one_of_its_target_s_tokenizer(target, draft, texts, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(draft / "model", folder)
    pieces = tokenization.train(
        [f"{i * 7919} others {i * i}\n" * 9 for i in range(99)], tmp_path / "t", 320
    )
    pieces.save(folder)
    wrong = config("draft", texts, target=str(target / "model"), init=str(folder))
    with pytest.raises(InputError, match=r"^init: expected a model with the tokenizer in "):
        recipes.draft(wrong, tmp_path / "wrong")


def test_a_run_does_not_go_on_with_another_corpus(texts, tmp_path):
    other = tmp_path / "texts"
    shutil.copytree(texts, other)
    small = {"steps": 1, "optimization": {"warmup": 0}}
    recipes.target(config("target", str(other), **small), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "data")
    recipes.target(config("target", str(other), **small), tmp_path / "run")  # the same again
    shutil.rmtree(tmp_path / "run" / "data")
    (other / "3.txt").write_text("another text\n" * 20)
    with pytest.raises(InputError, match=r": expected the config .*pinned.corpus='.*, found '"):
        recipes.target(config("target", str(other), **small), tmp_path / "run")


@pytest.mark.parametrize("mixture", ["target", "draft"])
def test_a_draft_learns_from_samples_on_a_mesh(target, texts, tmp_path, mixture):
    shares = {"corpus": 0.5, mixture: 0.5, "samples": 8, "prompt_length": 8}
    changes = {
        "target": str(target / "model"), "steps": 4, "eval_every": 4, "mixture": shares,
        "length": 64,  # the whole context
        "teacher": {"keep": "top_k" if mixture == "target" else "nothing", "k": 16},
        "optimization": {"warmup": 1, "accumulate": 2}, "compute": {"remat": True},
    }  # fmt: skip
    found = {}
    for name, mesh in (("one", None), ("mesh", sharding.mesh(2, 4))):
        recipes.draft(config("draft", texts, **changes), tmp_path / name, mesh)
        found[name] = records(tmp_path / name, "held_out")[-1]
    for metric in ("loss", "acceptance"):
        one, many = (found[name][metric]["mean"] for name in ("one", "mesh"))
        assert one == pytest.approx(many, abs=2e-3), metric


BAD = [
    (
        "target",
        {"data": {"train": ("nosuch",)}},
        "nosuch: expected a file, a folder with files, or",
    ),
    ("target", {"data": {"train": ()}}, "train: expected one source or more, found none"),
    ("target", {"steps": 0}, "steps: expected an integer >= 1, found 0"),
    ("target", {"length": 65}, "length: expected at most the context, 64, found 65"),
    ("target", {"length": 0}, "length: expected an integer >= 1, found 0"),
    ("target", {"optimization": {"b1": 1.5}}, "b1: expected a finite number of 0 or more, at most"),
    ("target", {"optimization": {"b2": 1.0}}, "b2: expected a number below 1, found 1"),
    ("target", {"model": {"num_layers": True}}, "num_layers: expected an integer, found True"),
    ("target", {"tokenizer": "a\0b"}, "tokenizer: expected a path, found 'a"),
    ("target", {"data": {"train": ("",)}}, "train, held_out: expected paths, found an empty"),
    ("target", {"model": {"vocab_size": 10**12}}, "vocab_size: expected an integer"),
    ("target", {"eval_every": 0}, "eval_every: expected an integer >= 1, found 0"),
    ("target", {"eval_examples": 0}, "eval_examples: expected at least 1, found 0"),
    ("target", {"batch": 3}, r"batch: expected a multiple of 2 \(accumulate times"),
    ("target", {"keep": 0}, "keep: expected an integer >= 1, found 0"),
    ("target", {"compute": {"dtype": "int8"}}, "dtype: expected a floating-point type"),
    (
        "target",
        {"model": {"num_heads": 6, "num_kv_heads": 6}},
        "num_heads: expected a multiple of the",
    ),
    (
        "target",
        {"model": {"vocab_size": 8}},
        "vocab_size: expected a size that fits the texts, found",
    ),
    (
        "target",
        {"tokenizer": "nosuch.model"},
        "nosuch.model: expected a tokenizer's file, found",
    ),
    ("draft", {"target": "nosuch"}, "'nosuch': expected a model folder or one of"),
    ("draft", {"objective": {"name": "kl"}}, "objective: expected cross_entropy or one of"),
    ("draft", {"mixture": {"corpus": 0.7}}, "mixture: expected three shares that add up to 1"),
    (
        "draft",
        {"mixture": {"corpus": 0.0, "draft": 1.0, "prompt_length": 40}},
        "mixture.prompt_length",
    ),
    ("draft", {"trial": {"prompt_length": 64}}, "trial.prompt_length: expected at most 33, found"),
    ("draft", {"trial": {"new_tokens": 57}}, "trial.new_tokens: expected at most 56, in a context"),
    ("draft", {"trial": {"num_speculative_tokens": 64}}, "trial.num_speculative_tokens: expected"),
    (
        "draft",
        {"init": "pystdlib/draft"},
        r"init: expected a model with vocab_size=320, found 4096",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_a_mistake_is_one_line_and_leaves_no_run(target, texts, tmp_path, name, changes, message):
    options = {"target": str(target / "model")} if name == "draft" else {}
    wrong = config(name, texts, **options)
    wrong.update(changes)
    run = recipes.target if name == "target" else recipes.draft
    with pytest.raises(InputError, match=f"^{message}") as caught:
        run(wrong, tmp_path / "run", sharding.mesh(2, 4))
    assert "\n" not in str(caught.value)
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left <= {"data", "cache", ".lock"}, "nothing that would be taken for a run"


def test_after_a_mistake_the_same_folder_can_be_used(target, texts, tmp_path):
    wrong = config("target", texts)
    wrong.length = 65
    with pytest.raises(InputError):
        recipes.target(wrong, tmp_path / "run")
    other = config("target", texts, steps=1, optimization={"warmup": 0})
    other.model.vocab_size = 340
    recipes.target(other, tmp_path / "run")


def test_another_target_in_the_same_place_is_noticed(target, texts, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(target / "model", folder)
    small = {"target": str(folder), "teacher": {"keep": "nothing"}}
    recipes.draft(config("draft", texts, **small), tmp_path / "run")
    other = spsjax.load(folder)
    other.params["norm"]["scale"] = other.params["norm"]["scale"] * 1.5
    loading.save(folder, other)
    with pytest.raises(InputError, match=r": expected the config .*pinned.target='.*, found '"):
        recipes.draft(config("draft", texts, **small), tmp_path / "run")


def test_weights_that_are_not_finite_are_not_saved(texts, tmp_path):
    wild = config("target", texts, eval_every=1)
    wild.optimization.update({"learning_rate": 1e29, "warmup": 0})
    with pytest.raises(NonFiniteError, match=r"^step \d+: expected (a )?finite "):
        recipes.target(wild, tmp_path / "run")
    for step in Checkpoints(tmp_path / "run" / "checkpoints").steps():
        scores = [each["loss"]["mean"] for each in records(tmp_path / "run", "held_out")]
        assert step <= len(scores) and np.isfinite(scores).all()


def test_a_run_that_another_process_works_on_is_left_alone(target, texts):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:2]\n"
        "import ml_collections, spsjax.training.run_folder as runs\n"
        "folder = runs.Folder(sys.argv[2], ml_collections.ConfigDict(eval(sys.argv[3])))\n"
        "folder.hold()\n"
    )
    known = json.loads((target / "config.json").read_text())
    known["data"]["train"] = tuple(known["data"]["train"])
    del known["pinned"]
    command = [sys.executable, "-c", code, str(ROOT), str(target), repr(known)]
    run_folder.Folder(target, config("target", texts)).hold()
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert "in use by another process" in result.stderr


def test_a_field_that_a_config_lacks_is_named(target, texts, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x"}\n')
    with pytest.raises(InputError, match=rf"^{path}:1: expected a field 'text', found content$"):
        recipes.target(config("target", str(path)), tmp_path / "run")


def test_a_target_without_a_tokenizer_is_refused(target, texts, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((target / "model" / name).read_bytes())
    with pytest.raises(InputError, match=r": expected a tokenizer beside the weights, found n"):
        recipes.draft(config("draft", texts, target=str(folder)), tmp_path / "run")


def test_a_tokenizer_of_more_pieces_than_the_model_has_is_refused(texts, tmp_path):
    path = tmp_path / "tokenizer.model"
    tokenization.train([f"def function_{index}(x): return x\n" for index in range(9)], path, 330)
    with pytest.raises(
        InputError, match=r"^model.vocab_size: expected at least the tokenizer's 330"
    ):
        recipes.target(config("target", texts, tokenizer=str(path)), tmp_path / "run")


def test_a_log_that_was_cut_off_in_the_middle_of_a_line_goes_on(target, texts, tmp_path):
    folder = run_folder.Folder(tmp_path, config("target", texts))
    folder.hold()
    folder.go_on(0)
    for step in (1, 2, 3):
        folder.log(step, "train", loss=float(step))
    path = tmp_path / "log.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "3", '{"a": 1}', *lines[1:], '{"step": 4, "gro']))
    folder.go_on(2)
    folder.log(3, "train", loss=0.5)
    assert [(line["step"], line["loss"]) for line in records(tmp_path, "train")] == [
        (1, 1.0), (2, 2.0), (3, 0.5),
    ]  # fmt: skip
