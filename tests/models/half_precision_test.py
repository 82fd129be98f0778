"""Promises of float32 for inputs of half precision, against NumPy in float64.

Expected values are computed from the rounded inputs, so that only the arithmetic can differ.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import reference
from helpers.models import tiny_config

import spsjax
from spsjax import SamplingParams, sampling
from spsjax.caches import Segment
from spsjax.models import attention, transformer
from spsjax.verifiers import inputs

HALF_ULP = 2.0**-8  # of bfloat16, relative, with room for float32 arithmetic


def rounded(array):
    """Returns an array in bfloat16, and the same values in float64."""
    half = jnp.asarray(array, jnp.bfloat16)
    return half, np.asarray(half.astype(jnp.float32), np.float64)


def test_rotary_embedding_is_computed_in_float32():
    """Only the result is rounded, also at positions that bfloat16 cannot count."""
    rng = np.random.default_rng(0)
    positions = np.asarray([[0, 1, 257, 4001]], np.int32)
    half, x = rounded(rng.normal(size=(1, 4, 2, 16)))
    angles = positions[:, :, None, None] * 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rope = attention.rope_angles(jnp.asarray(positions), attention.rope_frequencies(16, 10_000.0))
    assert {array.dtype for array in rope} == {jnp.dtype("float32")}
    result = attention.rotate(half, *rope)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(result, np.float64), expected, rtol=HALF_ULP / 2 * 1.01, atol=2e-3
    )


@pytest.mark.parametrize(("T", "G"), [(1, 2), (1, 4), (3, 2)], ids=["single", "heads", "chunk"])
def test_attention_scores_are_computed_in_float32(T, G):
    """Scores of about 30 would change weights by a tenth if they were rounded to bfloat16."""
    rng = np.random.default_rng(1)
    H, C, S = 4, 16, 8
    (query, q), (keys, k), (values, v) = (
        rounded(rng.normal(0, scale, shape))
        for scale, shape in ((3, (2, T, H, C)), (3, (2, G, S, C)), (1, (2, G, S, C)))
    )
    visible = jnp.ones((2, T, S), bool)
    segment = Segment(keys, values, visible, jnp.tile(jnp.arange(S), (2, 1)), None)
    result = np.asarray(attention.attend(query, [segment], [None], 1.0, 0.0), np.float64)
    k, v = (np.repeat(array, H // G, axis=1) for array in (k, v))
    scores = np.einsum("bthc,bhsc->bths", q, k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bths,bhsc->bthc", weights, v)
    assert np.abs(scores).max() > 30
    np.testing.assert_allclose(result, expected, atol=3 * HALF_ULP * np.abs(v).max())


@pytest.mark.parametrize("T", (1, 2))
def test_attention_tells_scores_apart_that_bfloat16_cannot(T):
    """Scores of 64 and 64.1875 are one number in bfloat16, and their weights 0.453 and 0.547."""
    query = jnp.ones((1, T, 2, 4), jnp.bfloat16)
    keys = jnp.asarray([[[[64, 0, 0, 0], [64, 0.0625, 0.0625, 0.0625]]]], jnp.bfloat16)
    values = jnp.asarray([[[[1, 0, 0, 0], [0, 1, 0, 0]]]], jnp.bfloat16)
    segment = Segment(keys, values, jnp.ones((1, T, 2), bool), jnp.asarray([[0, 1]]), None)
    mixed = attention.attend(query, [segment], [None], 1.0)
    share = 1 / (1 + np.exp(-3 / 16))
    expected = np.broadcast_to([1 - share, share, 0, 0], mixed.shape)
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected, atol=HALF_ULP)


@pytest.mark.parametrize("T", (1, 3))
def test_attention_in_float64_is_exact(T):
    """Also compiled, and where one query of several heads is multiplied in another way."""
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        query, keys, values = (rng.normal(size=(1, T, 4, 8)), *rng.normal(size=(2, 1, 2, 5, 8)))
        visible, positions = np.ones((1, T, 5), bool), np.arange(5)[None]
        attend = jax.jit(
            lambda q, k, v: attention.attend(
                q, [Segment(k, v, visible, positions, None)], [None], 1.0
            )
        )
        mixed = np.asarray(attend(query, keys, values))
    k, v = (np.repeat(array, 2, axis=1) for array in (keys, values))
    weights = np.exp(np.einsum("bthc,bhsc->bths", query, k))
    weights /= weights.sum(-1, keepdims=True)
    assert mixed.dtype == np.float64
    np.testing.assert_allclose(mixed, np.einsum("bths,bhsc->bthc", weights, v), atol=1e-14)


@pytest.mark.parametrize("T", (1, 3))
def test_attention_gradient_of_a_lone_token_is_zero(T):
    """Its weight is 1 whatever its query, also in rounded products."""
    rng = np.random.default_rng(2)
    query, keys, values = (
        jnp.asarray(array, jnp.bfloat16)
        for array in (rng.normal(size=(1, T, 4, 8)), *rng.normal(size=(2, 1, 2, T, 8)))
    )
    visible = jnp.tril(jnp.ones((T, T), bool))[None]

    def total(query):
        segment = Segment(keys, values, visible, jnp.arange(T)[None], None)
        return jnp.sum(attention.attend(query, [segment], [None], 1.0) * values[0, 0, 0])

    gradient = jax.grad(total)(query)
    assert not np.any(gradient[:, 0])
    assert T == 1 or np.all(np.any(gradient[:, 1:], axis=-1))


def test_attention_products_are_float32():
    """Products of half-precision queries, keys and tables are not rounded to half precision."""
    query = jnp.full((1, 1, 2, 1, 4), 1.0, jnp.bfloat16)
    single = query.swapaxes(2, 3)  # two heads of one query: another product
    keys = jnp.asarray(np.full((1, 1, 2, 4), 1 + 2**-7), jnp.bfloat16).at[..., 0].set(64)
    exact = 64 + 3 * (1 + 2**-7)
    alone = query[:, :, :1]  # one query of one head, which CPUs compute twice
    for rows in (query, single, alone):
        score = attention._score(rows, keys)
        assert score.shape == (*rows.shape[:4], 2)
        assert score.dtype == jnp.float32 and np.all(score == exact)
    for shape in ((1, 1, 2, 1, 2), (1, 1, 1, 2, 2), (1, 1, 1, 1, 2)):
        weights = jnp.ones(shape, jnp.float32)
        assert attention._mix(weights, keys).dtype == jnp.float32
    distances = attention.distance_scores(query[:, 0], keys[0])
    assert distances.dtype == jnp.float32 and np.all(distances == exact)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_probabilities_of_half_precision_logits_are_float32(dtype):
    """A sum of 5000 probabilities has more bits than half precision."""
    logits = jnp.asarray(np.random.default_rng(2).normal(0, 2, (2, 5000)), dtype)
    rows = SamplingParams(temperature=[1.0, 0.7], top_p=[1.0, 0.9003]).rows(2)
    probs = sampling.to_probs(logits, rows)
    assert probs.dtype == jnp.float32
    exact = np.asarray(logits.astype(jnp.float32), np.float64)
    for row, params in enumerate(({}, {"temperature": 0.7, "top_p": 0.9003})):
        expected = reference.to_probs(exact[row], **params)
        np.testing.assert_allclose(probs[row], expected, rtol=5e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_distributions_of_half_precision_are_widened(dtype):
    """Distributions that a caller brings in half precision are summed in float32."""
    pair = np.random.default_rng(3).dirichlet(np.ones(5000), 2)
    draft, target = jnp.asarray(pair, dtype)
    assert inputs.distributions("x", draft).dtype == jnp.float32
    exact = [np.asarray(probs.astype(jnp.float32), np.float64) for probs in (draft, target)]
    left = np.maximum(exact[1] - 0.6 * exact[0], 0)
    kept = np.minimum(exact[0], exact[1] / 0.6)
    emitted = kept + (1 - kept.sum()) * left / left.sum()
    expected = 0.5 * np.abs(emitted - exact[1]).sum()
    bias = spsjax.lenience_bias(draft, target, 0.6)
    assert bias.dtype == jnp.float32 and float(bias) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_one_row_is_multiplied_as_two(num_experts):
    """No product with weights has one row, and the row's values are those of a row among two."""
    config = tiny_config(48, num_experts=num_experts, experts_per_token=min(num_experts, 2))
    params = transformer.init(config, jax.random.key(0), jnp.bfloat16)

    def hidden(tokens):
        return transformer.apply(config, params, tokens).hidden

    one, two = jnp.asarray([[5]]), jnp.asarray([[5], [5]])
    program = jax.jit(hidden).lower(one).as_text()
    operands = re.findall(r"dot_general.*: \((tensor<[^>]*>), (tensor<[^>]*>)\)", program)
    weights = [rows for rows, matrix in operands if "32x" in matrix]
    assert weights and all(re.match("tensor<(1x)?2x", rows) for rows in weights)
    np.testing.assert_array_equal(jax.jit(hidden)(one), jax.jit(hidden)(two)[:1])
