"""One training step: the same however it is cut up and wherever it runs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_config
from toy import CONFIG, EXAMPLES, VOCAB

from spsjax import InputError
from spsjax.data import pipeline
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import losses
from spsjax.training import step as train_step

FLOAT32 = train_step.Compute("float32")


def optimization(**changes):
    return train_step.Optimization(**{"learning_rate": 1e-2, "steps": 20, "warmup": 2} | changes)


def steps(mesh=None, count=4, compute=FLOAT32, config=CONFIG, batch=None, **changes):
    """State and metrics after some steps on the first examples."""
    how = optimization(**changes)
    state, metrics = train_step.initial(config, how, mesh, 0), {}
    step = train_step.step(train_step.language_model(config, compute), how)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        batch = pipeline.put(batch or {"tokens": EXAMPLES[:16]}, 16, sharding.batch_sharding(mesh))
        for _ in range(count):
            state, metrics = step(state, {}, batch)
    return state, metrics


@pytest.fixture(scope="module")
def plain():
    """The result of the plainest way."""
    return steps()


def assert_same(found, expected, tolerance):
    for left, right in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0])):
        np.testing.assert_allclose(left, right, atol=tolerance)
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=100 * tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((2, 4), {}),
        ((8, 1), {}),
        ((1, 8), {}),
        (None, {"accumulate": 4}),
        ((2, 4), {"accumulate": 4}),
    ],
)
def test_a_mesh_and_accumulation_change_nothing_but_the_rounding(plain, shape, changes):
    mesh = sharding.mesh(*shape) if shape else None
    assert_same(steps(mesh, **changes), plain, 2e-5)


def test_recomputing_activations_changes_nothing(plain):
    assert_same(steps(compute=train_step.Compute("float32", remat=True)), plain, 1e-6)


def test_bfloat16_is_the_type_of_the_products_not_of_the_weights(plain):
    found = steps(compute=train_step.Compute("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(found[0])} == {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }
    assert_same(found, plain, 4e-2)
    with pytest.raises(AssertionError):
        assert_same(found, plain, 1e-4)  # it really was another type


def test_weights_and_optimizer_are_split_alike():
    mesh = sharding.mesh(2, 4)
    where = sharding.param_shardings(mesh, CONFIG)
    for count in (0, 2):
        state, _ = steps(mesh, count=count)
        moments = state["optimizer"][1][0]
        for tree in (state["params"], moments.mu, moments.nu):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                expected = where(tuple(entry.key for entry in path))
                assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), path
    split = [leaf for leaf in jax.tree.leaves(moments.mu) if not leaf.sharding.is_fully_replicated]
    assert len(split) >= 5


def test_two_replicas_each_take_half_of_a_batch():
    mesh = sharding.mesh(2, 1, jax.devices()[:2])
    batch = pipeline.put({"tokens": EXAMPLES[:16]}, 16, sharding.batch_sharding(mesh))
    assert [shard.data.shape for shard in batch["tokens"].addressable_shards] == [(8, 17)] * 2
    found = steps(mesh)
    for leaf in jax.tree.leaves(found[0]):
        first, second = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert np.array_equal(first, second)


def test_prompts_count_for_nothing():
    start = np.asarray([0, 5, 17, 1] * 4, np.int32)
    batch = {"tokens": EXAMPLES[:16], "start": start}
    _, metrics = steps(count=1, batch=batch)
    params = transformer.init(CONFIG, jax.random.key(0))
    logits = train_step.forward(CONFIG, params, EXAMPLES[:16, :-1]).logits
    values = np.asarray(losses.cross_entropy(logits, EXAMPLES[:16, 1:]))
    counted = [values[row, max(0, first - 1) :] for row, first in enumerate(start)]
    np.testing.assert_allclose(metrics["loss"], np.concatenate(counted).mean(), rtol=1e-5)

    def mean(params):
        logits = train_step.forward(CONFIG, params, EXAMPLES[:16, :-1]).logits
        values = losses.cross_entropy(logits, EXAMPLES[:16, 1:])
        return sum(jnp.sum(values[row, max(0, first - 1) :]) for row, first in enumerate(start)) / (
            sum(map(len, counted))
        )

    norm = optax.tree.norm(jax.grad(mean)(params))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)


def test_accumulated_parts_weigh_as_many_positions_as_they_have():
    batch = {"tokens": EXAMPLES[:16], "start": np.arange(16, dtype=np.int32)}
    assert_same(steps(batch=batch, accumulate=8), steps(batch=batch), 2e-5)


def test_the_rate_rises_and_falls_by_a_cosine():
    rate = train_step.Optimization(1.0, steps=110, warmup=10, final_rate=0.1).schedule()
    found = [float(rate(step - 1)) for step in (1, 5, 10, 60, 110)]  # optax counts from 0
    np.testing.assert_allclose(found, [0.1, 0.5, 1, 0.55, 0.1], atol=1e-6)
    for steps in (1, 3):
        rate = train_step.Optimization(1.0, steps=steps, warmup=0, final_rate=0.5).schedule()
        assert float(rate(0)) == 1 and float(rate(steps - 1)) == (0.5 if steps > 1 else 1)


@pytest.mark.parametrize("experts", [{}, {"num_experts": 2, "experts_per_token": 1}])
def test_only_matrices_are_decayed(experts):
    update = optimization(warmup=0, learning_rate=1.0, weight_decay=0.5).update()
    params = transformer.init(tiny_config(VOCAB, **experts), jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 1, params)
    zeros = jax.tree.map(np.zeros_like, params)
    change, _ = update.update(zeros, update.init(params), params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(change):
        embeds = path[-1].key == "embedding"
        assert np.any(leaf != 0) == (leaf.ndim > 1 and not embeds), path


def test_a_gradient_is_clipped_to_its_norm():
    update = optimization(warmup=0, clip=0.5).update()
    params = transformer.init(CONFIG, jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, params)
    state = [update.update(scale, update.init(params), params)[1] for scale in (
        ones, jax.tree.map(lambda leaf: 1000 * leaf, ones))]  # fmt: skip
    moments = [each[1][0].mu for each in state]
    np.testing.assert_allclose(optax.tree.norm(moments[0]), 0.5 * (1 - 0.9), rtol=1e-4)
    assert all(map(np.allclose, *map(jax.tree.leaves, moments)))


def test_a_position_never_sees_what_follows():
    params = transformer.init(CONFIG, jax.random.key(0))
    tokens = EXAMPLES[:1, :16]
    changed = tokens.copy()
    changed[0, 9:] = (changed[0, 9:] + 5) % VOCAB
    before, after = (train_step.forward(CONFIG, params, each).logits for each in (tokens, changed))
    assert np.array_equal(before[:, :9], after[:, :9])
    assert not np.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, r"steps: expected an integer >= 1, found 0"),
        ({"steps": 2.5}, r"steps: expected an integer >= 1, found 2.5"),
        ({"warmup": 20}, r"warmup: expected fewer than steps=20, found 20"),
        ({"accumulate": 0}, r"accumulate: expected an integer >= 1, found 0"),
        ({"learning_rate": 0.0}, r"learning_rate: expected a finite number above 0, found 0.0"),
        ({"clip": -1.0}, r"clip: expected a finite number above 0, found -1.0"),
        (
            {"final_rate": 2},
            r"final_rate: expected a finite number of 0 or more, at most 1, found 2",
        ),
        ({"learning_rate": float("nan")}, r"learning_rate: expected .*, found nan"),
        ({"b1": None}, r"b1: expected .*, found None"),
        ({"weight_decay": float("inf")}, r"weight_decay: expected .*, found inf"),
    ],
)
def test_an_optimization_that_is_none_is_refused(changes, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        optimization(**changes)


def test_a_batch_that_cannot_be_cut_is_refused():
    train_step.check_batch(12, 3, sharding.mesh(2, 1))
    with pytest.raises(
        InputError, match=r"^batch: expected a multiple of 6 \(accumulate times the"
    ):
        train_step.check_batch(9, 3, sharding.mesh(2, 1))
