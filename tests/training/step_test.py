"""Tests of a training step and its optimizer: the same result wherever and however it runs."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import tiny_config
from helpers.numpy_models import numpy_params
from helpers.toy_language import CONFIG, EXAMPLES, VOCAB

from spsjax.data import pipeline
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import losses
from spsjax.training import step as train_step
from spsjax.training.optimizer import OptimizerConfig

FLOAT32 = train_step.Precision("float32")


def optimizer_of(**changes):
    return OptimizerConfig(**{"learning_rate": 1e-2, "steps": 20, "warmup": 2} | changes)


@functools.cache
def step_of(precision, optimizer):
    return train_step.make_step(train_step.language_model_metrics(CONFIG, precision), optimizer)


def first_state(mesh, optimizer):
    param_shapes = train_step.model_shapes(CONFIG, mesh)
    where = jax.tree.map(lambda leaf: leaf.sharding, param_shapes)
    params = jax.device_put(numpy_params(CONFIG, 0), where)
    shapes = train_step.state_shapes(param_shapes, optimizer)
    return train_step.init_state(params, shapes, optimizer)


def run_steps(mesh=None, count=4, precision=FLOAT32, batch=None, **changes):
    """Returns state and metrics after some steps on the first examples."""
    optimizer = optimizer_of(**changes)
    state, step = first_state(mesh, optimizer), step_of(precision, optimizer)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        batch = pipeline.global_batch(
            batch or {"tokens": EXAMPLES[:16]}, 16, sharding.batch_sharding(mesh)
        )
        for _ in range(count):
            state, metrics = step(state, {}, batch)
    return state, metrics


@pytest.fixture(scope="module")
def reference():
    return run_steps()


@pytest.fixture(scope="module")
def on_mesh():
    return run_steps(sharding.mesh(2, 4))


def assert_close(result, expected, tolerance):
    for left, right in zip(jax.tree.leaves(result[0]), jax.tree.leaves(expected[0])):
        np.testing.assert_allclose(left, right, atol=tolerance)
    for name, value in expected[1].items():
        np.testing.assert_allclose(result[1][name], value, rtol=100 * tolerance, atol=tolerance)


def test_step_on_a_mesh_or_with_remat_changes_only_rounding(reference, on_mesh):
    assert_close(on_mesh, reference, 2e-5)
    precision = train_step.Precision("float32", remat=True)
    assert_close(run_steps(precision=precision), reference, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "accumulate"), [(None, 4), ((8, 1), 1), ((1, 8), 1), ((2, 4), 4)]
)
def test_step_split_in_other_ways_changes_only_rounding(reference, shape, accumulate):
    """On other meshes, and in microbatches, which have equally many positions."""
    mesh = sharding.mesh(*shape) if shape else None
    assert_close(run_steps(mesh, accumulate=accumulate), reference, 2e-5)


def test_step_in_bfloat16_keeps_float32_weights(reference):
    result = run_steps(precision=train_step.Precision("bfloat16"))
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(result[0])}
    assert dtypes == {np.dtype("float32"), np.dtype("int32")}
    assert_close(result, reference, 4e-2)
    with pytest.raises(AssertionError):
        assert_close(result, reference, 1e-4)  # the products really were of another type


def test_optimizer_state_is_sharded_like_the_weights(on_mesh):
    """In the first state, and after steps."""
    mesh = sharding.mesh(2, 4)
    sharding_of = sharding.param_shardings(mesh, CONFIG)
    for state in (first_state(mesh, optimizer_of()), on_mesh[0]):
        moments = state["optimizer"][1][0]
        for tree in (state["params"], moments.mu, moments.nu):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                expected = sharding_of(tuple(entry.key for entry in path))
                assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), path
        leaves = jax.tree.leaves(moments.mu)
        assert sum(not leaf.sharding.is_fully_replicated for leaf in leaves) >= 5


@pytest.mark.parametrize("shape", [None, (2, 4)])
def test_state_shapes_are_those_of_the_first_state(shape):
    """A checkpoint is restored by `state_shapes` into what `init_state` would have made."""
    mesh = sharding.mesh(*shape) if shape else None
    param_shapes = train_step.model_shapes(CONFIG, mesh)
    shapes = train_step.state_shapes(param_shapes, optimizer_of())
    init = functools.partial(transformer.init, CONFIG)
    params = train_step.random_params(init, param_shapes, 0)
    state = train_step.init_state(params, shapes, optimizer_of())
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for wanted, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state)):
        assert (wanted.shape, wanted.dtype) == (leaf.shape, leaf.dtype)
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_two_replicas_take_half_of_a_batch_each(on_mesh):
    mesh = sharding.mesh(2, 1, jax.devices()[:2])
    batch = pipeline.global_batch({"tokens": EXAMPLES[:16]}, 16, sharding.batch_sharding(mesh))
    assert [shard.data.shape for shard in batch["tokens"].addressable_shards] == [(8, 17)] * 2
    for leaf in jax.tree.leaves(on_mesh[0]):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all(len(equal) >= 2 for equal in copies.values())
        assert all(np.array_equal(one, same[0]) for same in copies.values() for one in same)


def with_prompts(start) -> dict[str, np.ndarray]:
    return {"tokens": EXAMPLES[:16], "start": np.asarray(start, np.int32)}


def test_prompt_tokens_add_nothing_to_loss_and_gradient():
    start = [0, 5, 17, 1] * 4
    _, metrics = run_steps(count=1, batch=with_prompts(start))
    counted = sum(16 - max(0, first - 1) for first in start)

    def mean_loss(params):
        logits = train_step.forward(CONFIG, params, EXAMPLES[:16, :-1]).logits
        values = losses.cross_entropy(logits, EXAMPLES[:16, 1:])
        sums = [jnp.sum(values[row, max(0, first - 1) :]) for row, first in enumerate(start)]
        return sum(sums) / counted

    params = first_state(None, optimizer_of())["params"]
    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    leaves = map(np.asarray, jax.tree.leaves(gradient))
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in leaves))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)


def test_microbatches_weigh_as_many_positions_as_they_have():
    batch = with_prompts(np.arange(16))
    assert_close(run_steps(batch=batch, accumulate=8), run_steps(batch=batch), 2e-5)


@pytest.mark.parametrize(
    ("steps", "warmup", "final", "expected"),
    [
        (110, 10, 0.1, {1: 0.1, 5: 0.5, 10: 1, 60: 0.55, 110: 0.1}),
        (1, 0, 0.5, {1: 1}),
        (3, 0, 0.5, {1: 1, 3: 0.5}),
    ],
)
def test_schedule_warms_up_and_decays_by_a_cosine(steps, warmup, final, expected):
    schedule = OptimizerConfig(1.0, steps=steps, warmup=warmup, final_rate=final).schedule()
    rates = [float(schedule(step - 1)) for step in expected]  # optax counts from 0
    np.testing.assert_allclose(rates, [*expected.values()], atol=1e-6)


@pytest.mark.parametrize("experts", [{}, {"num_experts": 2, "experts_per_token": 1}])
def test_weight_decay_affects_matrices_only(experts):
    transformation = optimizer_of(warmup=0, learning_rate=1.0, weight_decay=0.5).transformation()
    params = jax.tree.map(lambda leaf: leaf + 1, numpy_params(tiny_config(VOCAB, **experts), 0))

    @jax.jit
    def updated(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return transformation.update(zeros, transformation.init(params), params)[0]

    update = jax.tree.map(np.asarray, updated(params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(update):
        is_embedding = path[-1].key == "embedding"
        assert np.any(leaf != 0) == (leaf.ndim > 1 and not is_embedding), path


def test_gradient_is_clipped_to_the_norm():
    """Gradients that differ by a factor of 1000, both above the norm, give the same moments."""
    transformation = optimizer_of(warmup=0, clip=0.5).transformation()
    params = numpy_params(CONFIG, 0)

    @jax.jit
    def moments(params, factor):
        gradient = jax.tree.map(lambda leaf: factor * jnp.ones_like(leaf), params)
        _, state = transformation.update(gradient, transformation.init(params), params)
        return jax.tree.leaves(state[1][0].mu)

    small, large = (moments(params, factor) for factor in (1.0, 1000.0))
    norm = np.sqrt(sum(np.square(np.asarray(leaf)).sum() for leaf in small))
    np.testing.assert_allclose(norm, 0.5 * (1 - 0.9), rtol=1e-4)
    assert all(map(np.allclose, small, large))
