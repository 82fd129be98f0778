"""Kernels of sampling, interpreted, against a sort in NumPy and against plain XLA code."""

import functools

import jax
import numpy as np
import pytest
from helpers import reference
from sampling_test import FIELDS, ROWS, UNIFORM_MAX, logits_of, row_params

from spsjax import SamplingParams, sampling
from spsjax.parallel import sharding
from spsjax.sampling.fused import drawing
from spsjax.sampling.fused import probs as probs_kernels
from spsjax.utils.kernel_choice import KERNELS

VOCAB = 1500  # a whole share, and a part of one

to_probs = jax.jit(functools.partial(probs_kernels.to_probs, interpret=True))
draw = jax.jit(functools.partial(drawing.draw, interpret=True))


@pytest.mark.parametrize("kind", ("spread", "ties", "flat"))
def test_to_probs_equals_sorted_reference(kind):
    """At two nodes per row. Of two rows, one of them greedy, a node has a logit of infinity."""
    first = logits_of(kind, VOCAB)
    logits = np.stack([first, np.roll(first, 700, axis=-1)], axis=1)
    logits[[1, 5], 1, 1400] = np.inf
    found = np.asarray(to_probs(logits, row_params()))
    assert np.isnan(found[[1, 5], 1]).all()
    for row, node in np.ndindex(found.shape[:2]):
        if (row, node) not in {(1, 1), (5, 1)}:
            expected = reference.to_probs(logits[row, node], **dict(zip(FIELDS, ROWS[row])))
            np.testing.assert_array_equal(found[row, node] > 0, expected > 1e-45, err_msg=str(row))
            np.testing.assert_allclose(found[row, node], expected, rtol=2e-5, atol=1e-9)


def test_top_p_of_almost_one_keeps_nothing_that_top_k_dropped():
    """Rounding may make the mass of all that top-k has left too small for top-p."""
    rng, size = np.random.default_rng(2), (len(ROWS), 2)
    for _ in range(12):
        logits = np.full((*size, VOCAB), -1e4, np.float32)
        logits[..., :64] = np.round(rng.normal(0, 5, (*size, 64)))
        logits = rng.permuted(logits, axis=-1)
        temperatures, counts = rng.uniform(1, 2, len(ROWS)), rng.integers(20, 50, len(ROWS))
        rows = SamplingParams(list(temperatures), list(counts), 1 - 2**-24).rows(len(ROWS))
        kept = np.count_nonzero(np.asarray(to_probs(logits, rows)), axis=-1)
        assert (kept <= counts[:, None]).all()


def test_probabilities_sum_to_one_where_rounding_decides_over_min_p():
    """The weight of 500 tokens is min-p, up to rounding: all of them are kept, or none."""
    rng, count = np.random.default_rng(0), len(ROWS)
    temperatures, depth = rng.uniform(0.3, 3, count), rng.uniform(0.1, 3, (count, 1, 1))
    logits = np.full((count, 2, VOCAB), -50, np.float32)
    logits[..., :500] = -depth
    logits[..., 700] = 0
    min_p = np.exp(logits[:, 0, 0] / temperatures.astype(np.float32))
    rows = SamplingParams(list(temperatures), min_p=list(map(float, min_p))).rows(count)
    probs = np.asarray(to_probs(rng.permuted(logits, axis=-1), rows))
    np.testing.assert_allclose(probs.sum(axis=-1), 1, rtol=1e-5)
    assert set(np.count_nonzero(probs, axis=-1).ravel()) <= {1, 501}


def test_kernels_read_float32_beside_float64():
    with jax.enable_x64(True):
        rows = SamplingParams(top_k=[2], top_p=[0.9], min_p=[0.1]).rows(1)
        logits = np.asarray([[1.0, 0.0, 2.0]], np.float32)
        probs = jax.jit(functools.partial(probs_kernels.to_probs, interpret=True))(logits, rows)
        token = jax.jit(functools.partial(drawing.draw, interpret=True))(probs, np.zeros((1, 2)))
    np.testing.assert_allclose(probs, [[0.268941, 0, 0.731059]], rtol=1e-5)
    assert (probs.dtype, token.dtype, token[0]) == (np.float32, np.int32, 0)


@pytest.mark.parametrize("index", (0, 1, 3, 5, 7, 9), ids=lambda index: str(ROWS[index]))
def test_batches_of_equal_rows_equal_plain_code(index):
    """What no row uses is a branch of its own in the program."""
    logits = np.repeat(logits_of("ties", VOCAB)[:, None], 2, axis=1)
    rows = row_params([ROWS[index]] * len(ROWS))
    found, expected = to_probs(logits, rows), jax.jit(sampling.to_probs)(logits, rows)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("vocab", (129, VOCAB))
def test_draw_equals_plain_code(vocab):
    """Sums of whole numbers are exact, so draws are equal. Rows without weight draw token 0."""
    rng = np.random.default_rng(vocab)
    weights = rng.integers(0, 4, (3, 40, vocab)).astype(np.float32)
    weights[0, :3, rng.integers(vocab)] += 1
    weights[1, 0], weights[1, 1] = 0, np.nan
    weights[1, 2, :-1] = 0
    uniforms = np.floor(rng.random((3, 40, 2)) * 2**23).astype(np.float32) / 2**23
    uniforms[0, :2], uniforms[0, 2] = UNIFORM_MAX, 0
    drawn = draw(weights, uniforms)
    assert drawn.dtype == np.int32
    np.testing.assert_array_equal(drawn, jax.jit(sampling.draw)(weights, uniforms))


def test_draw_near_boundaries_skips_zero_weights():
    """Between blocks and between tokens, where rounding decides."""
    rng = np.random.default_rng(0)
    weights = rng.random((3, 40, VOCAB)).astype(np.float32)
    weights[..., :200] = weights[..., 640:768] = weights[..., ::7] = 0
    blocks = np.add.reduceat(weights.astype(np.float64), range(0, VOCAB, 128), axis=-1)
    ends = np.cumsum(blocks, axis=-1) / blocks.sum(axis=-1, keepdims=True)
    for boundary in range(ends.shape[-1]):
        level = np.clip(np.round(ends[..., boundary] * 2**23), 0, 2**23 - 1) / 2**23
        for inside in (0, 0.5, UNIFORM_MAX):
            uniforms = np.stack([level, np.full_like(level, inside)], -1).astype(np.float32)
            drawn = np.asarray(draw(weights, uniforms))[..., None]
            assert (np.take_along_axis(weights, drawn, axis=-1) > 0).all()


def test_mode_chooses_the_kernels():
    logits, uniforms = logits_of("spread", 3), np.full((len(ROWS), 2), 0.3, np.float32)

    def kernels_in(function, *arguments):
        return str(jax.make_jaxpr(function)(*arguments)).count("pallas_call")

    for function, arguments in (
        (sampling.to_probs, (logits, row_params())),
        (sampling.draw, (np.exp(logits), uniforms)),
    ):
        assert not kernels_in(function, *arguments)
        with KERNELS("interpret"):
            assert kernels_in(function, *arguments)
            with sharding.use_mesh(sharding.mesh(1, 2)):  # kernels cannot read split arrays
                assert not kernels_in(function, *arguments)
