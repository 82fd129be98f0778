"""Drafts that begin at chosen indices of a text in training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting

from spsjax.models import transformer
from spsjax.training import anchors, feature_losses
from spsjax.training.feature_losses import FeatureObjective
from spsjax.training.step import Precision

T, STEPS = 12, 3
TOKENS = np.random.default_rng(0).integers(0, 48, (3, T + 1)).astype(np.int32)
drawn = jax.jit(anchors.drawn, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=0)
def steps_of(drafter, params, tokens, index):
    """Returns the outputs of drafts at all indices, and of those at given ones."""
    output = transformer.apply(
        drafter.target, params["target"], tokens[:, :-1], tap_layers=drafter.tap_layers
    )
    features = drafter.features(params, output)
    arguments = params, tokens[:, 1:], features, STEPS
    every = [outputs[..., : drafter.target.d_model] for outputs in drafter.unrolled(*arguments)]
    return every, [*drafter.unrolled(*arguments, anchors=index)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("dflash", "eagle3")))
        for name in ("dflash", "dspark", "eagle3", "falcon", "spire", "medusa", "mlp_speculator")
    ],
)
def test_drafts_at_anchors_are_those_at_all_indices(target, name):
    """The indices differ from row to row. The last ones exceed the text in later steps."""
    drafter, weights = drafting.random_head(name, target.config)
    index = np.asarray([[0, 4, 11], [3, 5, 6], [1, 2, 10]])
    params = {"target": target.params, "drafter": weights}
    every, chosen = steps_of(drafter, params, TOKENS, index)
    for one, other in zip(every, chosen, strict=True):
        expected = np.take_along_axis(np.asarray(one), index[..., None], axis=1)
        width = expected.shape[-1]  # behind it, there may be the embedding of the token before
        np.testing.assert_allclose(other[..., :width], expected, atol=2e-5)


def test_anchors_are_drawn_among_drafts_that_count():
    """They are distinct, and count for the others. The texts alone determine them."""
    start, stop = np.asarray([0, 8, 11]), np.asarray([T + 1, T + 1, 12])
    batch, counts = {"tokens": TOKENS, "start": start, "stop": stop}, np.zeros(T, int)
    # In the third row the label 11 alone counts: drafts at 7, 8 and 9 reach it.
    eligible = [range(0, 11), range(4, 11), range(7, 10)]
    for seed in range(60):
        tokens = np.random.default_rng(seed).integers(0, 48, TOKENS.shape).astype(np.int32)
        index, weight = map(np.asarray, drawn(batch | {"tokens": tokens}, 5, STEPS))
        again = drawn(batch | {"tokens": tokens}, 5, STEPS)
        np.testing.assert_array_equal(index, again[0])
        assert (np.diff(index, axis=1) > 0).all() and index.max() < T
        for row, allowed in enumerate(eligible):
            weighs = np.isin(index[row], allowed)
            assert weighs.sum() == min(5, len(allowed))
            expected = weighs * len(allowed) / min(5, len(allowed))
            np.testing.assert_allclose(weight[row], expected, rtol=1e-6)
        counts += np.bincount(index[0], minlength=T)
    assert (counts[:11] > 10).all() and counts[11] == 0


def cost(target, count) -> float:
    """Returns the floating-point operations of the loss of drafts at some indices."""
    drafter, weights = drafting.random_head("dflash", target.config)
    objective = FeatureObjective(steps=STEPS, anchors=count)
    metrics = feature_losses.feature_metrics(drafter, objective, Precision())
    frozen, batch = {"target": target.params, "drafter": {}}, {"tokens": jnp.asarray(TOKENS)}
    return jax.jit(metrics).lower(weights, frozen, batch).cost_analysis()["flops"]


def test_blocks_cost_as_much_as_there_are_anchors(target):
    """The vocabulary's logits included: what remains is the target, and reading its features."""
    few, some, every = (cost(target, count) for count in (2, 4, 0))
    assert every - some == pytest.approx((T - 4) / 2 * (some - few), rel=0.1)
