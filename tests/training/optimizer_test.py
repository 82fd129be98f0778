"""Tests of the optimizer: schedule, weight decay, clipping and checks of its options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import tiny_config
from helpers.numpy_models import numpy_params
from helpers.toy_language import CONFIG, VOCAB

from spsjax import InputError
from spsjax.training.optimizer import OptimizerConfig


def optimizer(**changes):
    return OptimizerConfig(**{"learning_rate": 1e-2, "steps": 20, "warmup": 2} | changes)


def test_schedule_warms_up_and_decays_by_a_cosine():
    schedule = OptimizerConfig(1.0, steps=110, warmup=10, final_rate=0.1).schedule()
    rates = [float(schedule(step - 1)) for step in (1, 5, 10, 60, 110)]  # optax counts from 0
    np.testing.assert_allclose(rates, [0.1, 0.5, 1, 0.55, 0.1], atol=1e-6)


@pytest.mark.parametrize(("steps", "last"), [(1, 1.0), (3, 0.5)])
def test_schedule_without_warmup_starts_at_the_peak(steps, last):
    schedule = OptimizerConfig(1.0, steps=steps, warmup=0, final_rate=0.5).schedule()
    assert float(schedule(0)) == 1 and float(schedule(steps - 1)) == last


@pytest.mark.parametrize("experts", [{}, {"num_experts": 2, "experts_per_token": 1}])
def test_weight_decay_affects_matrices_only(experts):
    transformation = optimizer(warmup=0, learning_rate=1.0, weight_decay=0.5).transformation()
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
    transformation = optimizer(warmup=0, clip=0.5).transformation()
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, r"steps: expected an integer >= 1, found 0"),
        ({"steps": 2.5}, r"steps: expected an integer >= 1, found 2.5"),
        ({"warmup": 20}, r"warmup: expected fewer than steps=20, found 20"),
        ({"accumulate": 0}, r"accumulate: expected an integer >= 1, found 0"),
        ({"accumulate": True}, r"accumulate: expected an integer >= 1, found True"),
        ({"learning_rate": 0.0}, r"learning_rate: expected a finite number above 0, found 0.0"),
        ({"clip": -1.0}, r"clip: expected a finite number above 0, found -1.0"),
        ({"final_rate": 2}, r"final_rate: expected a finite number of 0 or more, .*, found 2"),
        ({"learning_rate": float("nan")}, r"learning_rate: expected .*, found nan"),
        ({"b1": None}, r"b1: expected .*, found None"),
        ({"b2": 1.0}, r"b2: expected a number below 1, found 1"),
        ({"weight_decay": float("inf")}, r"weight_decay: expected .*, found inf"),
    ],
)
def test_invalid_option_is_refused(changes, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        optimizer(**changes)
