"""Tests of distillation: every objective, target cache and kind of text improves the draft."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import tiny_config
from helpers.toy_language import CONFIG, EXAMPLES, HELD_OUT, VOCAB

from spsjax import InputError
from spsjax.data import pipeline
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import distillation, losses, metrics, target_cache
from spsjax.training import step as train_step
from spsjax.training.optimizer import OptimizerConfig

FLOAT32 = train_step.Precision("float32")
ONE_DEVICE = sharding.batch_sharding(None)
DRAFT = tiny_config(VOCAB, tie_embeddings=True, d_ff=16, num_heads=4)


def train(config, metrics_of, params, frozen, table, steps=60, replace_batch=None):
    """Parameters after some steps."""
    optimizer = OptimizerConfig(1e-2, steps=steps, warmup=4)
    shapes = train_step.state_shapes(train_step.model_shapes(config, None), optimizer)
    # A copy, because a step consumes its state.
    state = train_step.init_state(jax.tree.map(jnp.array, params), shapes, optimizer)
    step = train_step.make_step(metrics_of, optimizer)
    batches = pipeline.BatchIterator([table], [1.0], 16, 0, ONE_DEVICE)
    for number in range(steps):
        batch = next(batches)
        if replace_batch:
            batch = replace_batch(number, state["params"], batch)
        state, _ = step(state, frozen, batch)
    return state["params"]


@pytest.fixture(scope="module")
def target() -> Model:
    """A target that has learned the toy language."""
    start = transformer.init(CONFIG, jax.random.key(0))
    metrics_of = train_step.language_model_metrics(CONFIG, FLOAT32)
    params = train(CONFIG, metrics_of, start, {}, pipeline.Table(tokens=EXAMPLES))
    return Model("target", CONFIG, params)


def metrics_for(name="forward_kl", temperatures=(1.0,)) -> train_step.PerTokenMetrics:
    objective = distillation.Objective(name, temperatures)
    return distillation.distillation_metrics(DRAFT, CONFIG, objective, FLOAT32)


def evaluate(target, params) -> dict[str, float]:
    table = pipeline.Table(tokens=HELD_OUT)
    summaries = metrics.evaluate_batches(
        jax.jit(metrics_for()), params, target.params, table, 16, ONE_DEVICE
    )
    return {name: summary.mean for name, summary in summaries.items()}


def cached_columns(target, examples, folder, store, k=6, temperatures=(1.0,)):
    cache = target_cache.TargetCache(store, k)
    return cache.columns(target, examples, temperatures, folder, ONE_DEVICE, "float32")


def distill(target, folder, name="forward_kl", temperatures=(1.0,), store="nothing", mixture=None):
    """Metrics on held-out text before and after distillation."""
    start = transformer.init(DRAFT, jax.random.key(7))
    mixture = mixture or distillation.Mixture()
    columns = {"tokens": EXAMPLES}
    if mixture.target:
        columns = target_cache.target_samples(target, EXAMPLES, mixture, folder, 0)
    columns |= cached_columns(target, columns["tokens"], folder, store, temperatures=temperatures)
    replace_batch = None
    if mixture.draft:
        as_model = functools.partial(Model, "draft", DRAFT)
        replace_batch = distillation.on_policy(mixture, as_model, ONE_DEVICE, 0)
    metrics_of, table = metrics_for(name, temperatures), pipeline.Table(**columns)
    params = train(DRAFT, metrics_of, start, target.params, table, replace_batch=replace_batch)
    return evaluate(target, start), evaluate(target, params)


@pytest.mark.parametrize("name", ["cross_entropy", *losses.DIVERGENCES])
def test_every_objective_improves_the_draft(target, tmp_path, name):
    """Acceptance and greedy agreement rise by 0.3, and the target stays as it is."""
    frozen = jax.tree.map(np.array, target.params)
    before, after = distill(target, tmp_path, name)
    assert after["acceptance"] > before["acceptance"] + 0.3
    assert after["greedy_agreement"] > before["greedy_agreement"] + 0.3
    assert all(map(np.array_equal, jax.tree.leaves(frozen), jax.tree.leaves(target.params)))


def test_cached_target_trains_like_a_running_one(target, tmp_path):
    _, running = distill(target, tmp_path, temperatures=(0.5, 1.0))
    for store in ("states", "top_k"):
        _, cached = distill(target, tmp_path, temperatures=(0.5, 1.0), store=store)
        assert cached["acceptance"] == pytest.approx(running["acceptance"], abs=0.03), store


@pytest.mark.parametrize(("store", "k"), [("states", 1), ("top_k", VOCAB - 1)])
def test_cached_target_gives_the_metrics_of_a_running_one(target, tmp_path, store, k):
    metrics_of = metrics_for(temperatures=(0.7,))
    params = transformer.init(DRAFT, jax.random.key(3))
    expected = metrics_of(params, target.params, {"tokens": HELD_OUT})
    cached = cached_columns(target, HELD_OUT, tmp_path, store, k, temperatures=(0.7,))
    frozen = None if store == "top_k" else target.params  # "top_k" needs no weights at all
    result = metrics_of(params, frozen, {"tokens": HELD_OUT, **cached})
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, atol=2e-2, err_msg=name)


def test_cache_of_more_tokens_than_there_are_leaves_a_rest(target, tmp_path):
    """At least one token is not stored: a rest of no tokens would have no probability."""
    columns = cached_columns(target, HELD_OUT, tmp_path, "top_k", VOCAB + 5)
    assert columns["ids"].shape[-1] == VOCAB - 1
    params = transformer.init(DRAFT, jax.random.key(3))
    logits = train_step.forward(DRAFT, params, HELD_OUT[:, :-1]).logits
    coarse = losses.top_k_with_rest(logits, columns["ids"])
    rest = 1 - np.exp(coarse[..., :-1]).sum(-1)
    np.testing.assert_allclose(np.exp(coarse[..., -1]), rest, atol=1e-5)
    assert np.isfinite(columns["log_probs"]).all() and rest.min() > 0


@pytest.mark.parametrize("temperatures", [(0.5,), (2.0, 0.5)])
def test_temperatures_divide_both_logits_and_are_averaged(target, temperatures):
    params = transformer.init(DRAFT, jax.random.key(3))
    target_logits = train_step.forward(CONFIG, target.params, HELD_OUT[:, :-1]).logits
    logits = train_step.forward(DRAFT, params, HELD_OUT[:, :-1]).logits
    result = metrics_for(temperatures=temperatures)(params, target.params, {"tokens": HELD_OUT})
    expected = [losses.forward_kl(target_logits / t, logits / t) for t in temperatures]
    np.testing.assert_allclose(result["loss"], np.mean(expected, axis=0), rtol=1e-4, atol=1e-5)
    acceptance = losses.acceptance(target_logits, logits)
    np.testing.assert_allclose(result["acceptance"], acceptance, rtol=1e-4)


@pytest.mark.parametrize(
    "shares", [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.0, 0.5)], ids=["target", "draft", "both"]
)
def test_every_kind_of_text_improves_the_draft(target, tmp_path, shares):
    mixture = distillation.Mixture(*shares, samples=48, prompt_length=3)
    before, after = distill(target, tmp_path, mixture=mixture)
    assert after["acceptance"] > before["acceptance"] + 0.3


def test_on_policy_batches_depend_on_step_and_prompts_alone(target):
    mixture = distillation.Mixture(0.5, 0.0, 0.5, prompt_length=5)
    as_model = functools.partial(Model, "draft", CONFIG)
    replace_batch = distillation.on_policy(mixture, as_model, ONE_DEVICE, seed=3)
    columns = {"tokens": EXAMPLES[:4], "start": np.zeros(4, np.int32)}
    batch = pipeline.global_batch(columns, 4, ONE_DEVICE)
    replaced = {}
    for step in range(40):
        result = replace_batch(step, target.params, batch)
        again = replace_batch(step, target.params, batch)
        assert all(map(np.array_equal, jax.tree.leaves(result), jax.tree.leaves(again)))
        if result is not batch:
            replaced[step] = np.asarray(result["tokens"])
            assert np.array_equal(replaced[step][:, :5], EXAMPLES[:4, :5])
            assert np.asarray(result["start"]).tolist() == [5] * 4
            assert result["tokens"].dtype == batch["tokens"].dtype
    assert 8 < len(replaced) < 32  # about half of the steps
    assert len({text.tobytes() for text in replaced.values()}) == len(replaced)


def test_continuations_follow_the_model_s_distribution(target):
    prompts = np.tile(EXAMPLES[:1, :4], (512, 1))
    texts = distillation.sample_continuations(target, prompts, 6, 1.0, seed=0)["tokens"]
    logits = train_step.forward(CONFIG, target.params, EXAMPLES[:1, :4]).logits[0, -1]
    probs = np.asarray(jax.nn.softmax(logits))
    counts = np.bincount(texts[:, 4], minlength=VOCAB) / 512
    assert 0.5 * np.abs(counts - probs).sum() < 0.08
    assert texts.shape == (512, 6) and np.array_equal(texts[:, :4], prompts)


def test_continuations_beyond_the_context_are_masked_padding(target):
    model = dataclasses.replace(target, config=dataclasses.replace(CONFIG, max_positions=16))
    columns = distillation.sample_continuations(model, EXAMPLES[:4, :5], 17, 1.0, seed=0)
    assert columns["tokens"].shape == (4, 17)
    assert columns["start"].tolist() == [5] * 4 and columns["stop"].tolist() == [16] * 4
    mask = np.asarray(train_step.loss_mask(jax.tree.map(jnp.asarray, columns)))
    assert mask.tolist() == [[0] * 4 + [1] * 11 + [0]] * 4


def test_target_samples_are_drawn_once(target, tmp_path, monkeypatch):
    # More samples than the corpus has examples.
    mixture = distillation.Mixture(0.0, 1.0, 0.0, samples=80, prompt_length=3)
    first = target_cache.target_samples(target, EXAMPLES, mixture, tmp_path, 0)["tokens"]
    assert first.shape == (80, 17) and first.dtype == np.int32
    starts = {row.tobytes() for row in EXAMPLES[:, :3].copy()}
    assert all(row.tobytes() in starts for row in first[:, :3].copy())
    assert len(np.unique(first, axis=0)) > 70
    monkeypatch.setattr(distillation, "sample_continuations", None)
    again = target_cache.target_samples(target, EXAMPLES, mixture, tmp_path, 0)
    assert np.array_equal(first, again["tokens"])


def test_target_cache_tells_targets_and_texts_apart(target, tmp_path):
    scaled = jax.tree.map(lambda leaf: 1.01 * leaf, target.params)
    cases = (target.params, HELD_OUT), (scaled, HELD_OUT), (target.params, HELD_OUT[::-1])
    for params, tokens in cases:
        model = Model("target", CONFIG, params)
        states = cached_columns(model, tokens, tmp_path, "states")["states"]
        expected = train_step.forward(CONFIG, params, tokens[:, :-1]).hidden
        np.testing.assert_allclose(states, expected, rtol=1e-2, atol=2e-3)
    assert len(list(tmp_path.glob("states-*"))) == 3


def test_target_states_beyond_float16_are_refused(target, tmp_path):
    params = jax.tree.map(jnp.array, target.params)
    params["norm"]["scale"] = params["norm"]["scale"] * 1e6
    model = Model("target", CONFIG, params)
    with pytest.raises(
        InputError, match=r"^target_cache.store: expected states in the range of float16"
    ):
        cached_columns(model, HELD_OUT, tmp_path, "states")


@pytest.mark.parametrize("size", [0, 50, -10])
def test_damaged_target_cache_is_named(target, tmp_path, size):
    cached_columns(target, HELD_OUT, tmp_path, "states")
    (path,) = tmp_path.glob("*/*.npy")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=f"^{path}: expected {len(HELD_OUT)} cached rows, found "):
        cached_columns(target, HELD_OUT, tmp_path, "states")


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (distillation.Objective, ("kl",), "objective: expected cross_entropy or one of forward_kl"),
        (distillation.Objective, ("forward_kl", ()), "temperatures: expected one or more numbers"),
        (distillation.Objective, ("forward_kl", (0.0,)), "temperatures: expected a finite number"),
        (distillation.Mixture, (0.5, 0.0, 0.4), "mixture: expected three shares that add up to 1"),
        (distillation.Mixture, (1.5, 0.0, -0.5), "mixture.corpus: expected a finite number of 0"),
        (distillation.Mixture, (float("nan"),), "mixture.corpus: expected a finite number of 0"),
        (distillation.Mixture, (1.0, 0.0, 0.0, 9, 9, 0), "mixture.prompt_length: expected an int"),
        (distillation.Mixture, (1.0, 0.0, 0.0, 9, 9, 9, -1.0), "mixture.temperature: expected "),
        (target_cache.TargetCache, ("logits",), "target_cache.store: expected 'nothing', 'states'"),
        (target_cache.TargetCache, ("top_k", 0), "target_cache.k: expected an integer >= 1, found"),
    ],
)
def test_invalid_option_is_refused(cls, options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        cls(*options)
