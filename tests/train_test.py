"""Training end to end on a toy language: losses fall, and a resumed run is the same run."""

import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from conftest import tiny_config

from spsjax import InputError, NonFiniteError, train
from spsjax.models import transformer

VOCAB = 16
CONFIG = tiny_config(VOCAB, tie_embeddings=True)


def toy_examples(count, seed):
    """[count, 17] sequences: each token is mostly its predecessor times 3 plus 1."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((count, 17), np.int32)
    tokens[:, 0] = rng.integers(0, VOCAB, count)
    for position in range(1, 17):
        follow = (tokens[:, position - 1] * 3 + 1) % VOCAB
        noise = rng.integers(0, VOCAB, count)
        tokens[:, position] = np.where(rng.random(count) < 0.9, follow, noise)
    return tokens


EXAMPLES, HELD_OUT = toy_examples(64, 0), toy_examples(16, 1)


def options(**changes):
    fields = {
        "steps": 40, "batch": 8, "learning_rate": 1e-2, "warmup": 4, "weight_decay": 0.1,
        "seed": 0, "checkpoint_every": 10, "eval_every": 20,
    }  # fmt: skip
    return ml_collections.ConfigDict(fields | changes)


def fit(workdir, loss=None, seed=0, **changes):
    params = transformer.init(CONFIG, jax.random.key(seed))
    loss = loss or train.language_model_loss(CONFIG)
    return train.fit(options(**changes), params, loss, EXAMPLES, HELD_OUT, workdir)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(workdir, parameters, held-out metrics) of a trained target."""
    workdir = tmp_path_factory.mktemp("target")
    return workdir, *fit(workdir)


def test_a_target_learns_the_language(target):
    workdir, _, metrics = target
    assert metrics["loss"] < 0.6 * np.log(VOCAB)
    lines = [json.loads(line) for line in (workdir / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert [line["step"] for line in lines if "held_out" in line] == [20, 40]


@pytest.mark.parametrize("objective", ["forward_kl", "lk_hybrid"])
def test_a_draft_learns_to_be_accepted_and_the_target_stays(target, tmp_path, objective):
    _, frozen, _ = target
    before = jax.tree.map(np.array, frozen)
    loss = train.distillation_loss(CONFIG, CONFIG, frozen, objective)
    pairs = [
        (tokens, train.target_states(CONFIG, frozen, tokens, tmp_path))
        for tokens in (EXAMPLES, HELD_OUT)
    ]
    draft = transformer.init(CONFIG, jax.random.key(7))
    start = train.evaluate(loss, draft, pairs[1], 8)
    _, metrics = train.fit(options(), draft, loss, *pairs, tmp_path)
    assert metrics["acceptance"] > start["acceptance"] + 0.2
    assert metrics["greedy_agreement"] > start["greedy_agreement"] + 0.2
    assert metrics["loss"] < start["loss"]
    assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(frozen)))


def test_a_target_s_states_give_its_logits_and_are_computed_once(target, tmp_path, monkeypatch):
    _, params, _ = target
    folder = tmp_path / "of" / "states"
    states = train.target_states(CONFIG, params, HELD_OUT, folder, batch=5)  # the last has one
    assert states.dtype == np.float16
    logits = transformer.head(CONFIG, params, states.astype(np.float32))
    expected = train.forward(CONFIG, params, HELD_OUT[:, :-1]).logits
    np.testing.assert_allclose(logits, expected, atol=2e-2)
    assert np.abs(expected).max() > 2
    monkeypatch.setattr(train, "forward", None)
    assert np.array_equal(states, train.target_states(CONFIG, params, HELD_OUT, folder))


def test_states_of_another_target_or_text_are_not_taken_for_this_one_s(target, tmp_path):
    _, params, _ = target
    others = jax.tree.map(lambda leaf: 1.01 * leaf, params)
    for weights, tokens in ((params, HELD_OUT), (others, HELD_OUT), (params, HELD_OUT[::-1])):
        states = train.target_states(CONFIG, weights, tokens, tmp_path)
        expected = train.forward(CONFIG, weights, tokens[:, :-1]).hidden
        np.testing.assert_allclose(states, expected, rtol=1e-2, atol=1e-3)
    assert len(list(tmp_path.iterdir())) == 3


def test_states_of_other_windows_over_the_same_tokens_are_others(target, tmp_path):
    tokens = HELD_OUT[:, :16].copy()
    for windows in (tokens, tokens.reshape(32, 8)):
        states = train.target_states(CONFIG, target[1], windows, tmp_path)
        assert states.shape == (len(windows), windows.shape[1] - 1, CONFIG.d_model)


@pytest.mark.parametrize("size", [0, 50, -10])
def test_damaged_states_are_named(target, tmp_path, size):
    train.target_states(CONFIG, target[1], HELD_OUT, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=f"^{path}: expected states, or no such file, found "):
        train.target_states(CONFIG, target[1], HELD_OUT, tmp_path)


@pytest.mark.parametrize("temperatures", [(), (0.0,), (1.0, -1.0)])
def test_a_temperature_that_is_none_is_refused(temperatures):
    with pytest.raises(InputError, match=r"^temperatures: expected one or more numbers above 0, "):
        train.distillation_loss(CONFIG, CONFIG, {}, "forward_kl", temperatures)


def test_an_interrupted_pass_leaves_no_states(target, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise Interrupted

    monkeypatch.setattr(train, "tqdm", stop)
    with pytest.raises(Interrupted):
        train.target_states(CONFIG, target[1], HELD_OUT, tmp_path)
    assert not list(tmp_path.iterdir())


class Interrupted(Exception):
    pass


def test_a_resumed_run_is_the_uninterrupted_one(target, tmp_path, monkeypatch):
    whole = train.data.batches

    def cut(*arguments):
        for index, batch in enumerate(whole(*arguments)):
            if index == 25:
                raise Interrupted
            yield batch

    monkeypatch.setattr(train.data, "batches", cut)
    with pytest.raises(Interrupted):
        fit(tmp_path)
    monkeypatch.setattr(train.data, "batches", whole)
    params, metrics = fit(tmp_path, seed=99)  # the start is the checkpoint's, not this one's
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(target[1])))
    assert metrics == target[2]
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 20, 30, 40, 40]  # 20 steps were kept, 5 more were lost


def test_a_finished_run_is_not_trained_again(target):
    workdir, expected, _ = target
    params, _ = fit(workdir)
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(expected)))


def test_the_rate_rises_stays_and_falls_to_zero():
    rate = train.schedule(1.0, steps=100, warmup=10)
    found = [float(rate(step)) for step in (0, 5, 10, 50, 79, 90, 100)]
    np.testing.assert_allclose(found, [0, 0.5, 1, 1, 1, 0.5, 0], atol=0.06)


def test_only_kernels_are_decayed():
    update = train.optimizer(options(warmup=0, learning_rate=1.0, weight_decay=0.5))
    params = transformer.init(tiny_config(VOCAB), jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 1, params)
    zeros = jax.tree.map(np.zeros_like, params)
    change, _ = update.update(zeros, update.init(params), params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(change):
        assert np.any(leaf != 0) == (path[-1].key == "kernel"), path


def test_a_position_never_sees_what_follows():
    params = transformer.init(CONFIG, jax.random.key(0))
    tokens = EXAMPLES[:1, :16]
    changed = tokens.copy()
    changed[0, 9:] = (changed[0, 9:] + 5) % VOCAB
    before, after = (train.forward(CONFIG, params, each).logits for each in (tokens, changed))
    assert np.array_equal(before[:, :9], after[:, :9])
    assert not np.allclose(before[:, 9:], after[:, 9:])


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    def loss(params, batch):
        value = jnp.float32(jnp.nan) * params["norm"]["scale"][0]
        return value, {"loss": value}

    with pytest.raises(NonFiniteError, match=r"^step 10: expected a finite loss, found nan$"):
        fit(tmp_path, loss)
    assert not (tmp_path / "metrics.json").exists()


def test_several_processes_are_refused_before_they_write_over_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match=r"^training: expected one process, found 2$"):
        fit(tmp_path)
    assert not list(tmp_path.iterdir())
