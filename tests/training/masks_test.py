"""Tests of the loss on answers alone: the mask reaches every task's batches and evaluations."""

import json

import jax
import numpy as np
import pytest
from helpers.tiny_training import ONE_STEP, config, untrained_target

from spsjax.data import pipeline
from spsjax.errors import InputError
from spsjax.training import fit, metrics
from spsjax.training import step as train_step
from spsjax.training.run import Run
from spsjax.training.tasks.drafter import prompts_before_answers
from spsjax.training.tasks.features import counts_of


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """A file of prompts and completions, which the tests' tokenizers can read."""
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    lines = (
        {"prompt": f"def function_{n}(total):\n    ", "completion": f"total = total + {n}\n"}
        for n in range(60)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def started(name, texts, talks, folder, **changes):
    """Returns a task that has its corpus: `talks`, with a tokenizer of `texts`."""
    target = untrained_target(texts, folder.parent)
    if name == "target":
        changes["tokenizer"] = str(target)
    options = config(name, talks, target, **ONE_STEP, **changes)
    task, options, folder = fit.prepare(options, folder / name)
    run = Run(options, folder, None, task.tokenizer, task.vocab_size, task.ends)
    task.start(run)
    return task, run


@pytest.mark.parametrize("name", ["target", "draft", "eagle3"])
def test_mask_reaches_batches_and_evaluations(texts, talks, tmp_path, monkeypatch, name):
    """Without it, a task trains or is evaluated on the questions, too."""
    task, run = started(name, texts, talks, tmp_path)
    mask_of = {row.tobytes(): mask for row, mask in zip(run.train[:], run.train.mask[:])}
    batch = next(task.batches())
    expected = np.stack([mask_of[np.asarray(row).tobytes()] for row in batch["tokens"]])
    np.testing.assert_array_equal(batch["mask"], expected)
    counts = np.asarray(train_step.loss_mask(batch))
    skipped = getattr(task, "skipped", 0)
    label = np.arange(1, expected.shape[1]) >= skipped
    np.testing.assert_array_equal(counts, expected[:, 1:] * label)
    assert 0 < counts.sum() < counts.size / 2
    tables = []

    def measure(self, metrics_of, params, frozen, table):
        tables.append(table)
        raise KeyboardInterrupt  # what follows would compile

    monkeypatch.setattr(Run, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        task.evaluate(1, None)
    (table,) = tables
    np.testing.assert_array_equal(table.columns["mask"], run.held_out_columns["mask"])
    assert table.columns["mask"].shape == run.held_out.shape


def test_texts_of_the_target_count_whole_beside_answers(texts, talks, tmp_path, monkeypatch):
    samples = {"tokens": np.ones((8, 33), np.int32), "start": np.full(8, 8), "stop": np.full(8, 33)}
    monkeypatch.setattr("spsjax.training.tasks.drafter.target_samples", lambda *_: dict(samples))
    mixture = {"corpus": 0.5, "target": 0.5, "samples": 8, "prompt_length": 8}
    changes = {"mixture": mixture, "target_cache": {"store": "nothing"}}
    task, _ = started("draft", texts, talks, tmp_path, **changes)
    batch = next(task.batches())
    sampled = (np.asarray(batch["tokens"]) == 1).all(axis=1)
    assert sampled.sum() == 2
    counts = np.asarray(train_step.loss_mask(batch))
    assert (counts[sampled] == (np.arange(1, 33) >= 8)).all() and (counts[~sampled] == 0).any()


def test_batch_without_answers_changes_nothing():
    """Its gradient is 0 and not a NaN."""
    optimizer = train_step.OptimizerConfig(steps=2, warmup=0, learning_rate=1.0, weight_decay=0.0)
    state = train_step.init_state({"w": jax.numpy.ones(3)}, train_step.state_shapes(
        {"w": jax.ShapeDtypeStruct((3,), np.float32)}, optimizer), optimizer)  # fmt: skip
    step = train_step.make_step(
        lambda params, frozen, batch: {"loss": params["w"][batch["tokens"][:, 1:]]}, optimizer
    )
    batch = {"tokens": np.zeros((2, 4), np.int32), "mask": np.zeros((2, 4), np.int32)}
    state, values = step(state, {}, batch)
    assert state["params"]["w"].tolist() == [1, 1, 1] and values["loss"] == 0
    with pytest.raises(InputError, match=r"^eval_examples: expected examples with tokens that cou"):
        metrics.summarize(np.ones((2, 3)), np.zeros((2, 3)))


def test_drafted_tokens_are_counted_in_answers():
    tokens, counts = [0, 1, 2, 3, 3, 3, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 1, 1]
    examples = pipeline.TokenWindows(tokens, 2, counts=np.asarray(counts))
    assert len(examples) == 3  # the first window has no label that counts
    assert counts_of(examples, 5).tolist() == [1, 1, 0, 3, 0]  # windows share a token
    whole = pipeline.TokenWindows(tokens, 2)
    assert counts_of(whole, 5).sum() == 12


def test_prompts_of_an_evaluation_end_before_answers():
    tokens = np.arange(24).reshape(3, 8)
    mask = np.asarray([[1, 1, 0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    prompts = prompts_before_answers(tokens, mask, 3)
    assert prompts.tolist() == [[1, 2, 3], [8, 9, 10], [16, 17, 18]]
    assert prompts_before_answers(tokens, mask, 8).tolist() == tokens.tolist()


def test_run_of_an_older_version_resumes_without_new_keys(texts, tmp_path):
    """A key that its config lacks has its default."""
    from spsjax.training import config as configs
    from spsjax.training.run_folder import Folder

    values = config("target", texts).to_dict()
    stored = json.loads(json.dumps(values))
    assert stored["data"].pop("loss") == "answers"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    defaults = configs.defaults(configs.TargetConfig)
    assert Folder(tmp_path, values, (), defaults).resumable
    values["data"]["loss"] = "all"
    with pytest.raises(InputError, match=r"data\.loss='answers', found 'all'"):
        Folder(tmp_path, values, (), defaults)
