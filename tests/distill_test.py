"""Distillation: every objective, teacher and kind of text brings a draft nearer to its target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config
from toy import CONFIG, EXAMPLES, HELD_OUT, VOCAB

from spsjax import InputError
from spsjax.data import pipeline
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import distillation, losses, metrics, target_cache
from spsjax.training import step as train_step

FLOAT32 = train_step.Compute("float32")
PLACE = sharding.batch_sharding(None)
DRAFT = tiny_config(VOCAB, tie_embeddings=True, d_ff=16, num_heads=4)


def fit(values, params, frozen, table, count=60, change=None):
    """Some steps of training."""
    how = train_step.Optimization(1e-2, steps=count, warmup=4)
    state = train_step.initial(CONFIG, how, None, 0)
    params = jax.tree.map(jnp.array, params)  # a copy: the steps take its memory
    state = {"params": params, "optimizer": how.update().init(params)}
    step, feed = train_step.step(values, how), pipeline.Feed([table], [1.0], 16, 0, PLACE)
    for number in range(count):
        batch = next(feed)
        if change:
            batch = change(number, state["params"], batch)
        state, _ = step(state, frozen, batch)
    return state["params"]


@pytest.fixture(scope="module")
def target() -> Model:
    """A target that knows the language."""
    start = transformer.init(CONFIG, jax.random.key(0))
    values = train_step.language_model(CONFIG, FLOAT32)
    return Model("target", CONFIG, fit(values, start, {}, pipeline.Table(tokens=EXAMPLES)))


def measured(target, params) -> dict[str, float]:
    values = distillation.values(DRAFT, CONFIG, distillation.Objective("forward_kl"), FLOAT32)
    table = pipeline.Table(tokens=HELD_OUT)
    found = metrics.on_examples(jax.jit(values), params, target.params, table, 16, PLACE)
    return {name: means.mean for name, means in found.items()}


def distilled(target, folder, name="forward_kl", temperatures=(1.0,), keep="nothing", mixture=None):
    start = transformer.init(DRAFT, jax.random.key(7))
    how = distillation.Objective(name, temperatures)
    values = distillation.values(DRAFT, CONFIG, how, FLOAT32)
    mixture = mixture or distillation.Mixture()
    columns = {"tokens": EXAMPLES}
    if mixture.target:
        columns = target_cache.samples(target, EXAMPLES, mixture, folder, 0)
    examples = columns["tokens"]
    kept = target_cache.Teacher(keep, k=6).columns(
        target, examples, how.temperatures, folder, PLACE, "float32"
    )
    table = pipeline.Table(**columns, **kept)
    change = None
    if mixture.draft:
        change = distillation.on_policy(
            mixture, lambda params: Model("draft", DRAFT, params), PLACE, 0
        )
    before = measured(target, start)
    return before, measured(target, fit(values, start, target.params, table, change=change))


@pytest.mark.parametrize("name", ["cross_entropy", *losses.DIVERGENCES])
def test_every_objective_brings_the_draft_nearer(target, tmp_path, name):
    frozen = jax.tree.map(np.array, target.params)
    before, after = distilled(target, tmp_path, name)
    assert after["acceptance"] > before["acceptance"] + 0.3
    assert after["greedy_agreement"] > before["greedy_agreement"] + 0.3
    assert all(map(np.array_equal, jax.tree.leaves(frozen), jax.tree.leaves(target.params)))


def test_what_is_kept_of_a_target_stands_for_it(target, tmp_path):
    _, live = distilled(target, tmp_path, temperatures=(0.5, 1.0))
    for keep in ("states", "top_k"):
        _, kept = distilled(target, tmp_path, temperatures=(0.5, 1.0), keep=keep)
        assert kept["acceptance"] == pytest.approx(live["acceptance"], abs=0.03), keep


def test_values_from_what_is_kept_are_those_of_the_target(target, tmp_path):
    how = distillation.Objective("forward_kl", (0.7,))
    values = distillation.values(DRAFT, CONFIG, how, FLOAT32)
    params = transformer.init(DRAFT, jax.random.key(3))
    live = values(params, target.params, {"tokens": HELD_OUT})
    for keep, k in (("states", 1), ("top_k", VOCAB - 1)):
        kept = target_cache.Teacher(keep, k).columns(
            target, HELD_OUT, how.temperatures, tmp_path, PLACE, "float32"
        )
        found = values(
            params, None if keep == "top_k" else target.params, {"tokens": HELD_OUT, **kept}
        )
        for name, value in live.items():
            np.testing.assert_allclose(found[name], value, atol=2e-2, err_msg=f"{keep} {name}")


def test_temperatures_divide_the_logits_of_both_and_are_averaged(target):
    params = transformer.init(DRAFT, jax.random.key(3))
    logits = [
        np.asarray(train_step.forward(config, weights, HELD_OUT[:, :-1]).logits)
        for config, weights in ((CONFIG, target.params), (DRAFT, params))
    ]
    for temperatures in ((0.5,), (2.0, 0.5)):
        how = distillation.Objective("forward_kl", temperatures)
        found = distillation.values(DRAFT, CONFIG, how, FLOAT32)(
            params, target.params, {"tokens": HELD_OUT}
        )
        each = [losses.forward_kl(*(one / t for one in logits)) for t in temperatures]
        np.testing.assert_allclose(found["loss"], np.mean(each, axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["acceptance"], losses.acceptance(*logits), rtol=1e-4)


@pytest.mark.parametrize(
    "shares", [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.0, 0.5)], ids=["target", "draft", "both"]
)
def test_every_kind_of_text_brings_the_draft_nearer(target, tmp_path, shares):
    mixture = distillation.Mixture(*shares, samples=48, prompt_length=3)
    before, after = distilled(target, tmp_path, mixture=mixture)
    assert after["acceptance"] > before["acceptance"] + 0.3


def test_the_draft_s_own_texts_follow_the_step_and_their_prompts(target):
    mixture = distillation.Mixture(0.5, 0.0, 0.5, prompt_length=5)
    change = distillation.on_policy(
        mixture, lambda params: Model("draft", CONFIG, params), PLACE, seed=3
    )
    batch = pipeline.put({"tokens": EXAMPLES[:4], "start": np.zeros(4, np.int32)}, 4, PLACE)
    changed = {}
    for step in range(40):
        found = change(step, target.params, batch)
        again = change(step, target.params, batch)
        assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(again)))
        if found is not batch:
            changed[step] = np.asarray(found["tokens"])
            assert np.array_equal(changed[step][:, :5], EXAMPLES[:4, :5])
            assert np.asarray(found["start"]).tolist() == [5] * 4
            assert found["tokens"].dtype == batch["tokens"].dtype
    assert 8 < len(changed) < 32
    assert len({text.tobytes() for text in changed.values()}) == len(changed)


def test_on_policy_texts_are_samples_of_the_draft(target):
    prompts = np.tile(EXAMPLES[:1, :4], (512, 1))
    texts = distillation.continued(target, prompts, 6, 1.0, seed=0)["tokens"]
    logits = train_step.forward(CONFIG, target.params, EXAMPLES[:1, :4]).logits[0, -1]
    law = np.asarray(jax.nn.softmax(logits))
    counts = np.bincount(texts[:, 4], minlength=VOCAB) / 512
    assert 0.5 * np.abs(counts - law).sum() < 0.08
    assert texts.shape == (512, 6) and np.array_equal(texts[:, :4], prompts)


def test_what_a_context_has_no_room_for_is_padding_and_counts_for_nothing(target):
    model = dataclasses.replace(target, config=dataclasses.replace(CONFIG, max_positions=16))
    found = distillation.continued(model, EXAMPLES[:4, :5], 17, 1.0, seed=0)
    assert found["tokens"].shape == (4, 17)
    assert found["start"].tolist() == [5] * 4 and found["stop"].tolist() == [16] * 4
    weights = np.asarray(train_step.weights(jax.tree.map(jnp.asarray, found)))
    assert weights.tolist() == [[0] * 4 + [1] * 11 + [0]] * 4


def test_target_samples_are_drawn_once(target, tmp_path, monkeypatch):
    mixture = distillation.Mixture(
        0.0, 1.0, 0.0, samples=80, prompt_length=3
    )  # more than the corpus has
    first = target_cache.samples(target, EXAMPLES, mixture, tmp_path, 0)["tokens"]
    assert first.shape == (80, 17) and first.dtype == np.int32
    starts = {row.tobytes() for row in EXAMPLES[:, :3].copy()}
    assert all(row.tobytes() in starts for row in first[:, :3].copy())
    assert len(np.unique(first, axis=0)) > 70
    monkeypatch.setattr(distillation, "continued", None)
    again = target_cache.samples(target, EXAMPLES, mixture, tmp_path, 0)
    assert np.array_equal(first, again["tokens"])


def test_states_of_another_target_or_text_are_not_taken_for_this_one_s(target, tmp_path):
    keeping = target_cache.Teacher("states")
    others = jax.tree.map(lambda leaf: 1.01 * leaf, target.params)
    for weights, tokens in (
        (target.params, HELD_OUT), (others, HELD_OUT), (target.params, HELD_OUT[::-1]),
    ):  # fmt: skip
        model = Model("target", CONFIG, weights)
        states = keeping.columns(model, tokens, (1.0,), tmp_path, PLACE, "float32")["states"]
        expected = train_step.forward(CONFIG, weights, tokens[:, :-1]).hidden
        np.testing.assert_allclose(states, expected, rtol=1e-2, atol=2e-3)
    assert len(list(tmp_path.glob("states-*"))) == 3


@pytest.mark.parametrize("size", [0, 50, -10])
def test_damaged_states_are_named(target, tmp_path, size):
    arguments = target, HELD_OUT, (1.0,), tmp_path, PLACE, "float32"
    target_cache.Teacher("states").columns(*arguments)
    (path,) = tmp_path.glob("*/*.npy")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=f"^{path}: expected {len(HELD_OUT)} rows that were kept,"):
        target_cache.Teacher("states").columns(*arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: distillation.Objective("kl"),
            "objective: expected cross_entropy or one of forward_kl",
        ),
        (
            lambda: distillation.Objective("forward_kl", ()),
            "temperatures: expected one or more numbers",
        ),
        (
            lambda: distillation.Objective("forward_kl", (0.0,)),
            "temperatures: expected a finite number",
        ),
        (
            lambda: distillation.Mixture(0.5, 0.0, 0.4),
            "mixture: expected three shares that add up to 1",
        ),
        (
            lambda: distillation.Mixture(1.5, 0.0, -0.5),
            "mixture.corpus: expected a finite number of 0",
        ),
        (
            lambda: distillation.Mixture(float("nan")),
            "mixture.corpus: expected a finite number of 0",
        ),
        (
            lambda: distillation.Mixture(prompt_length=0),
            "prompt_length: expected an integer >= 1, found",
        ),
        (lambda: distillation.Mixture(temperature=-1.0), "mixture.temperature: expected "),
        (
            lambda: target_cache.Teacher("logits"),
            "keep: expected 'nothing', 'states' or 'top_k', found",
        ),
        (lambda: target_cache.Teacher("top_k", 0), "k: expected an integer >= 1, found 0"),
    ],
)
def test_what_is_none_is_refused(make, message):
    with pytest.raises(InputError, match=f"^{message}"):
        make()
