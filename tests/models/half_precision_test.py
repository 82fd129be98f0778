"""Promises of float32 for inputs of half precision, against NumPy in float64.

Expected values are computed from the rounded inputs, so that only the arithmetic can differ.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import reference
from helpers.models import tiny_config
from helpers.numpy_models import numpy_params

import spsjax
from spsjax import SamplingParams, sampling
from spsjax.models import attention, relative, rope, transformer
from spsjax.models.caches import Segment
from spsjax.verifiers import inputs

HALF_ULP = 2.0**-8  # of bfloat16, relative, with room for float32 arithmetic
# Of attention: rows, heads, their size, and slots.
B, H, C, S = 2, 4, 16, 8
# A rounding that a fault adds must stay in the program.
strict_jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
to_probs = jax.jit(sampling.to_probs)
lenience_bias = jax.jit(spsjax.lenience_bias, static_argnums=2)


def rounded(array):
    """Returns an array in bfloat16, and the same values in float64."""
    half = np.asarray(array, jnp.bfloat16)
    return half, half.astype(np.float64)


def mixed_of(query, keys, values, visible):
    """Attends to one segment, at a scale of 1."""
    positions = jnp.broadcast_to(jnp.arange(keys.shape[2]), visible[:, 0].shape)
    segment = Segment(keys, values, visible, positions, None)
    return attention.attend(query, [segment], [None], 1.0)


attend = strict_jit(mixed_of)


@strict_jit
def rotated(x, positions):
    """Returns cosines and sines of some positions, and what is rotated by them."""
    angles = rope.angles(positions, 16, 10_000.0)
    return angles, rope.rotate(x, *angles)


def test_rotary_embedding_is_computed_in_float32():
    """Only the result is rounded, also at positions that bfloat16 cannot count."""
    rng = np.random.default_rng(0)
    positions = np.asarray([[0, 1, 257, 4001]], np.int32)
    half, x = rounded(rng.normal(size=(1, 4, 2, 16)))
    angles = positions[:, :, None, None] * 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rope, result = rotated(half, positions)
    assert {array.dtype for array in rope} == {jnp.dtype("float32")}
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(result, np.float64), expected, rtol=HALF_ULP / 2 * 1.01, atol=2e-3
    )


@pytest.mark.parametrize(("T", "G"), [(1, 2), (1, 4), (3, 2)], ids=["single", "heads", "chunk"])
def test_attention_scores_are_computed_in_float32(T, G):
    """Scores of about 30 would change weights by a tenth if they were rounded to bfloat16."""
    rng = np.random.default_rng(1)
    (query, q), (keys, k), (values, v) = (
        rounded(rng.normal(0, scale, shape))
        for scale, shape in ((3, (B, T, H, C)), (3, (B, G, S, C)), (1, (B, G, S, C)))
    )
    result = np.asarray(attend(query, keys, values, np.ones((B, T, S), bool)), np.float64)
    k, v = (np.repeat(array, H // G, axis=1) for array in (k, v))
    scores = np.einsum("bthc,bhsc->bths", q, k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bths,bhsc->bthc", weights, v)
    assert np.abs(scores).max() > 30
    np.testing.assert_allclose(result, expected, atol=3 * HALF_ULP * np.abs(v).max())


@pytest.mark.parametrize("T", (1, 3))
def test_attention_tells_scores_apart_that_bfloat16_cannot(T):
    """Scores of 64 and 64.1875 are one number in bfloat16, and their weights 0.453 and 0.547."""
    keys, values = np.zeros((2, B, 2, S, C), jnp.bfloat16)
    keys[..., :2, 0], keys[..., 1, 1:4] = 64, 0.0625
    values[..., 0, 0] = values[..., 1, 1] = 1
    visible = np.broadcast_to(np.arange(S) < 2, (B, T, S))
    mixed = attend(np.ones((B, T, H, C), jnp.bfloat16), keys, values, visible)
    share = 1 / (1 + np.exp(-3 / 16))
    expected = np.zeros(mixed.shape)
    expected[..., :2] = 1 - share, share
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected, atol=HALF_ULP)


@pytest.mark.parametrize("T", (1, 3))
def test_attention_in_float64_is_exact(T):
    """Also compiled, and where one query of several heads is multiplied in another way."""
    rng = np.random.default_rng(1)
    query, keys, values = (rng.normal(size=(1, T, 4, 8)), *rng.normal(size=(2, 1, 2, 5, 8)))
    with jax.enable_x64(True):
        mixed = np.asarray(attend(query, keys, values, np.ones((1, T, 5), bool)))
    k, v = (np.repeat(array, 2, axis=1) for array in (keys, values))
    weights = np.exp(np.einsum("bthc,bhsc->bths", query, k))
    weights /= weights.sum(-1, keepdims=True)
    assert mixed.dtype == np.float64
    np.testing.assert_allclose(mixed, np.einsum("bths,bhsc->bthc", weights, v), atol=1e-14)


@strict_jit
@jax.grad
def gradient_of_queries(query, keys, values, visible):
    return jnp.sum(mixed_of(query, keys, values, visible) * values[0, 0, 0])


@pytest.mark.parametrize("T", (1, 3))
def test_attention_gradient_of_a_lone_token_is_zero(T):
    """Its weight is 1 whatever its query, also in rounded products."""
    rng = np.random.default_rng(2)
    query, keys, values = (
        np.asarray(array, jnp.bfloat16)
        for array in (rng.normal(size=(1, T, 4, 8)), *rng.normal(size=(2, 1, 2, T, 8)))
    )
    gradient = np.asarray(gradient_of_queries(query, keys, values, np.tri(T, dtype=bool)[None]))
    assert not np.any(gradient[:, 0])
    assert T == 1 or np.all(np.any(gradient[:, 1:], axis=-1))


@strict_jit
def products(query, keys):
    """Returns scores, mixed values and distance scores, of two heads, of one, and of one query."""
    rows = query, query.swapaxes(2, 3), query[:, :, :1]
    scores = [attention._score(row, keys) for row in rows]
    mixed = [attention._weighted_sum(jnp.ones(score.shape, jnp.float32), keys) for score in scores]
    return scores, mixed, relative.distance_scores(query[:, 0], keys[0])


def test_attention_products_are_float32():
    """Products of half-precision queries, keys and tables are not rounded to half precision."""
    keys = np.full((1, 1, 2, 4), 1 + 2**-7, jnp.bfloat16)
    keys[..., 0] = 64
    exact = 64 + 3 * (1 + 2**-7)
    scores, mixed, distances = products(np.ones((1, 1, 2, 1, 4), jnp.bfloat16), keys)
    assert [score.shape[2:] for score in scores] == [(2, 1, 2), (1, 2, 2), (1, 1, 2)]
    for score in (*scores, distances):
        assert score.dtype == jnp.float32 and np.all(np.asarray(score) == exact)
    assert {array.dtype for array in mixed} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_probabilities_of_half_precision_logits_are_float32(dtype):
    """A sum of 5000 probabilities has more bits than half precision."""
    logits = np.random.default_rng(2).normal(0, 2, (2, 5000)).astype(jnp.dtype(dtype))
    rows = SamplingParams(temperature=[1.0, 0.7], top_p=[1.0, 0.9003]).rows(2)
    probs = np.asarray(to_probs(logits, rows))
    assert probs.dtype == np.float32
    exact = logits.astype(np.float64)
    for row, params in enumerate(({}, {"temperature": 0.7, "top_p": 0.9003})):
        expected = reference.to_probs(exact[row], **params)
        np.testing.assert_allclose(probs[row], expected, rtol=5e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_distributions_of_half_precision_are_widened(dtype):
    """Distributions that a caller brings in half precision are summed in float32."""
    pair = np.random.default_rng(3).dirichlet(np.ones(5000), 2)
    draft, target = pair.astype(jnp.dtype(dtype))
    assert inputs.distributions("x", draft).dtype == jnp.float32
    exact = [probs.astype(np.float64) for probs in (draft, target)]
    left = np.maximum(exact[1] - 0.6 * exact[0], 0)
    kept = np.minimum(exact[0], exact[1] / 0.6)
    emitted = kept + (1 - kept.sum()) * left / left.sum()
    expected = 0.5 * np.abs(emitted - exact[1]).sum()
    bias = lenience_bias(draft, target, 0.6)
    assert bias.dtype == jnp.float32 and float(bias) == pytest.approx(expected, abs=1e-4)


@functools.partial(jax.jit, static_argnums=0)
def hidden(config, params, tokens):
    return transformer.apply(config, params, tokens).hidden


@pytest.mark.parametrize("num_experts", [0, 4])
def test_one_row_is_multiplied_as_two(num_experts):
    """No product with weights has one row, and the row's values are those of a row among two."""
    config = tiny_config(48, num_experts=num_experts, experts_per_token=min(num_experts, 2))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), numpy_params(config, 0))
    one, two = np.asarray([[5]]), np.asarray([[5], [5]])
    program = hidden.lower(config, params, one).as_text()
    operands = re.findall(r"dot_general.*: \((tensor<[^>]*>), (tensor<[^>]*>)\)", program)
    weights = [rows for rows, matrix in operands if "32x" in matrix]
    assert weights and all(re.match("tensor<(1x)?2x", rows) for rows in weights)
    alone, among_two = (np.asarray(hidden(config, params, tokens)) for tokens in (one, two))
    np.testing.assert_array_equal(alone, among_two[:1])
