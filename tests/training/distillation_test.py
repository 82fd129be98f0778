"""Tests of distillation: metrics of every objective, cached targets and sampled texts."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.models import tiny_config
from helpers.numpy_models import numpy_params
from helpers.toy_language import CONFIG, EXAMPLES, HELD_OUT, VOCAB, forward
from scipy import special

from spsjax import InputError
from spsjax.data import pipeline
from spsjax.loading import Model
from spsjax.parallel import sharding
from spsjax.training import distillation, losses, metrics, target_cache
from spsjax.training import step as train_step
from spsjax.training.optimizer import OptimizerConfig

FLOAT32 = train_step.Precision("float32")
ONE_DEVICE = sharding.batch_sharding(None)
DRAFT = tiny_config(VOCAB, tie_embeddings=True, d_ff=16, num_heads=4)
OBJECTIVES = "cross_entropy", *losses.DIVERGENCES


def metrics_for(name="forward_kl", temperatures=(1.0,)) -> train_step.PerTokenMetrics:
    objective = distillation.Objective(name, temperatures)
    return distillation.distillation_metrics(DRAFT, CONFIG, objective, FLOAT32)


held_out_metrics = jax.jit(metrics_for())


def placed(params):
    """Returns parameters on the device on which a step leaves them, so that programs are shared."""
    return jax.device_put(params, ONE_DEVICE)


def train(config, metrics_of, params, frozen, table, steps=60):
    """Returns parameters after some steps."""
    optimizer = OptimizerConfig(1e-2, steps=steps, warmup=4)
    shapes = train_step.state_shapes(train_step.model_shapes(config, None), optimizer)
    # A step consumes its state, and so `params` stay in NumPy.
    state = train_step.init_state(placed(params), shapes, optimizer)
    step = train_step.make_step(metrics_of, optimizer)
    batches = pipeline.BatchIterator([table], [1.0], 16, 0, ONE_DEVICE)
    for _ in range(steps):
        state, _ = step(state, frozen, next(batches))
    return state["params"]


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    with drafting.small_programs():
        yield


@pytest.fixture(scope="module")
def target() -> Model:
    """A target that has learned the toy language."""
    metrics_of = train_step.language_model_metrics(CONFIG, FLOAT32)
    start, table = numpy_params(CONFIG, 0), pipeline.Table(tokens=EXAMPLES)
    return Model("target", CONFIG, train(CONFIG, metrics_of, start, {}, table))


def evaluate(target, params) -> dict[str, float]:
    table = pipeline.Table(tokens=HELD_OUT)
    args = held_out_metrics, params, target.params, table, 16, ONE_DEVICE
    summaries = metrics.evaluate_batches(*args)
    return {name: summary.mean for name, summary in summaries.items()}


def cached_columns(target, examples, folder, store, k=6, temperatures=(1.0,)):
    cache = target_cache.TargetCache(store, k)
    return cache.columns(target, examples, temperatures, folder, ONE_DEVICE, "float32")


# What the other objectives give is compared with NumPy, and a step on it lowers it (losses_test).
def test_distillation_improves_the_draft(target):
    frozen, start = jax.tree.map(np.array, target.params), numpy_params(DRAFT, 7)
    table = pipeline.Table(tokens=EXAMPLES)
    params = train(DRAFT, metrics_for(), start, target.params, table)
    before, after = evaluate(target, placed(start)), evaluate(target, params)
    assert after["acceptance"] > before["acceptance"] + 0.3
    assert after["greedy_agreement"] > before["greedy_agreement"] + 0.3
    assert all(map(np.array_equal, jax.tree.leaves(frozen), jax.tree.leaves(target.params)))


def test_cached_target_gives_the_metrics_of_a_running_one(target, tmp_path):
    """Of all tokens, "top_k" stores all but one, and needs no weights of the target."""
    params = numpy_params(DRAFT, 3, 0.3)
    cached = {
        store: cached_columns(target, HELD_OUT, tmp_path, store, VOCAB - 1, temperatures=(0.7,))
        for store in ("states", "top_k")
    }

    @jax.jit
    def metrics_of(params, frozen, tokens, cached):
        metrics_of, batch = metrics_for(temperatures=(0.7,)), {"tokens": tokens}
        return (
            metrics_of(params, frozen, batch),
            metrics_of(params, frozen, batch | cached["states"]),
            metrics_of(params, None, batch | cached["top_k"]),
        )

    expected, *results = metrics_of(params, target.params, HELD_OUT, cached)
    for result in results:
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, atol=2e-2, err_msg=name)


def test_cache_of_more_tokens_than_there_are_leaves_a_rest(target, tmp_path):
    """At least one token is not stored: a rest of no tokens would have no probability."""
    columns = cached_columns(target, HELD_OUT, tmp_path, "top_k", VOCAB + 5)
    assert columns["ids"].shape[-1] == VOCAB - 1
    logits, _ = forward(DRAFT, numpy_params(DRAFT, 3), HELD_OUT[:, :-1])
    coarse = np.asarray(jax.jit(losses.top_k_with_rest)(logits, columns["ids"]))
    rest = 1 - np.exp(coarse[..., :-1]).sum(-1)
    np.testing.assert_allclose(np.exp(coarse[..., -1]), rest, atol=1e-5)
    assert np.isfinite(columns["log_probs"]).all() and rest.min() > 0


def test_objective_of_logits_divided_by_temperatures_is_averaged(target):
    """Of every objective but the cross entropy; the acceptance is that at temperature 1."""
    params, tokens, temperatures = numpy_params(DRAFT, 3, 0.3), HELD_OUT, (2.0, 0.5)

    @jax.jit
    def found_and_expected(params, frozen):
        found = {name: metrics_for(name, temperatures) for name in OBJECTIVES}
        found = {name: of(params, frozen, {"tokens": tokens}) for name, of in found.items()}
        logits = train_step.forward(DRAFT, params, tokens[:, :-1]).logits
        target_logits = train_step.forward(CONFIG, frozen, tokens[:, :-1]).logits
        expected = {
            name: sum(of(target_logits / t, logits / t) for t in temperatures) / len(temperatures)
            for name, of in losses.DIVERGENCES.items()
        }
        expected["cross_entropy"] = losses.cross_entropy(logits, tokens[:, 1:])
        agree = target_logits.argmax(-1) == logits.argmax(-1)
        return found, expected, losses.acceptance(target_logits, logits), agree

    found, expected, acceptance, agree = found_and_expected(params, target.params)
    for name in OBJECTIVES:
        np.testing.assert_allclose(found[name]["loss"], expected[name], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[name]["acceptance"], acceptance, rtol=1e-4)
        np.testing.assert_array_equal(found[name]["greedy_agreement"], agree)
        cross_entropy = found[name]["cross_entropy"]
        np.testing.assert_allclose(cross_entropy, expected["cross_entropy"], rtol=1e-4)


ROWS = 40  # of samples that are drawn at once, by programs that tests share


def test_on_policy_batches_depend_on_step_and_prompts_alone(target):
    mixture = distillation.Mixture(0.5, 0.0, 0.5, prompt_length=5)
    as_model = functools.partial(Model, "draft", CONFIG)
    replace_batch = distillation.on_policy(mixture, as_model, ONE_DEVICE, seed=3)
    columns = {"tokens": EXAMPLES[:ROWS], "start": np.zeros(ROWS, np.int32)}
    batch = pipeline.global_batch(columns, ROWS, ONE_DEVICE)
    replaced = {}
    for step in range(24):
        result = replace_batch(step, target.params, batch)
        again = replace_batch(step, target.params, batch)
        assert all(map(np.array_equal, jax.tree.leaves(result), jax.tree.leaves(again)))
        if result is not batch:
            replaced[step] = np.asarray(result["tokens"])
            assert np.array_equal(replaced[step][:, :5], EXAMPLES[:ROWS, :5])
            assert np.asarray(result["start"]).tolist() == [5] * ROWS
            assert result["tokens"].dtype == batch["tokens"].dtype
    assert 6 <= len(replaced) <= 18  # about half of the steps
    assert len({text.tobytes() for text in replaced.values()}) == len(replaced)


def test_continuations_follow_the_model_s_distribution(target):
    prompts = np.tile(EXAMPLES[:1, :4], (ROWS, 1))
    draws = (distillation.sample_continuations(target, prompts, 6, 1.0, seed) for seed in range(13))
    texts = np.concatenate([columns["tokens"] for columns in draws])
    logits, _ = forward(CONFIG, target.params, EXAMPLES[:1, :4])
    probs = special.softmax(np.asarray(logits)[0, -1])
    counts = np.bincount(texts[:, 4], minlength=VOCAB) / len(texts)
    assert 0.5 * np.abs(counts - probs).sum() < 0.08
    assert texts.shape == (13 * ROWS, 6) and (texts[:, :4] == prompts[0]).all()


def test_continuations_beyond_the_context_are_masked_padding(target):
    model = dataclasses.replace(target, config=dataclasses.replace(CONFIG, max_positions=16))
    columns = distillation.sample_continuations(model, EXAMPLES[:4, :5], 17, 1.0, seed=0)
    assert columns["tokens"].shape == (4, 17)
    assert columns["start"].tolist() == [5] * 4 and columns["stop"].tolist() == [16] * 4
    mask = np.asarray(jax.jit(train_step.loss_mask)(columns))
    assert mask.tolist() == [[0] * 4 + [1] * 11 + [0]] * 4


def test_target_samples_are_drawn_once(target, tmp_path, monkeypatch):
    # More samples than the corpus has examples.
    mixture = distillation.Mixture(0.0, 1.0, 0.0, 2 * ROWS, ROWS, prompt_length=3)
    first = target_cache.target_samples(target, EXAMPLES, mixture, tmp_path, 0)["tokens"]
    assert first.shape == (80, 17) and first.dtype == np.int32
    starts = {row.tobytes() for row in EXAMPLES[:, :3].copy()}
    assert all(row.tobytes() in starts for row in first[:, :3].copy())
    assert len(np.unique(first, axis=0)) > 70
    monkeypatch.setattr(distillation, "sample_continuations", None)
    again = target_cache.target_samples(target, EXAMPLES, mixture, tmp_path, 0)
    assert np.array_equal(first, again["tokens"])


def test_target_cache_tells_targets_and_texts_apart(target, tmp_path):
    scaled = jax.tree.map(lambda leaf: np.float32(1.01) * np.asarray(leaf), target.params)
    cases = (target.params, HELD_OUT), (scaled, HELD_OUT), (target.params, HELD_OUT[::-1])
    for params, tokens in cases:
        model = Model("target", CONFIG, params)
        states = cached_columns(model, tokens, tmp_path, "states")["states"]
        _, expected = forward(CONFIG, params, tokens[:, :-1])
        np.testing.assert_allclose(states, expected, rtol=1e-2, atol=2e-3)
    assert len(list(tmp_path.glob("states-*"))) == 3


def test_target_states_beyond_float16_are_refused(target, tmp_path):
    params = jax.tree.map(np.array, target.params)
    params["norm"]["scale"] *= 1e6
    model = Model("target", CONFIG, params)
    message = r"^target_cache.store: expected states in the range of float16"
    with pytest.raises(InputError, match=message):
        cached_columns(model, HELD_OUT, tmp_path, "states")


@pytest.mark.parametrize("size", [0, 50, -10])
def test_damaged_target_cache_is_named(target, tmp_path, size):
    cached_columns(target, HELD_OUT, tmp_path, "states")
    (path,) = tmp_path.glob("*/*.npy")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=f"^{path}: expected {len(HELD_OUT)} cached rows, found "):
        cached_columns(target, HELD_OUT, tmp_path, "states")
