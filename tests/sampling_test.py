"""Tests of `to_probs` against a sort in NumPy, and of `draw` against inverted cumulative sums."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import reference
from helpers.environment import FAST

from spsjax import SamplingParams, sampling
from spsjax.sampling import probs as probs_module

VOCABS = (1, 2, 3, 129, 4096, 5000)
# Parameters per row of one batch: (temperature, top_k, top_p, min_p). The masses of top-p are not
# sums of few equal probabilities, where float32 and float64 may differ on "reaches".
to_probs, draw = jax.jit(sampling.to_probs), jax.jit(sampling.draw)
ROWS = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5001, 0.3),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 10_000, 1.0, 0.0),
    (1.0, 0, 0.9003, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.0502),
    (1.0, 0, 1.0, 1.0),
    (1.3, 40, 0.8007, 0.0203),
    (1e-3, 0, 0.9003, 0.0),
    (1e4, 7, 0.6997, 0.0),
    (1e-30, 0, 1.0, 0.0),
    (1.0, 0, 1e-38, 0.0),
    (0.7, 4, 1e-300, 0.0),
    (1.0, 1203, 1.0, 0.0502),
    (1.0, 1203, 0.9999, 0.0),
    (0.3, 40, 1 - 2**-24, 0.0),
)
FIELDS = ("temperature", "top_k", "top_p", "min_p")
SORTS = re.compile(r"\b(stablehlo\.sort|chlo\.top_k|top_k\()")
UNIFORM_MAX = 1 - 2.0**-23  # the largest that float32 uniforms can be


def row_params(rows=ROWS) -> sampling.RowParams:
    return SamplingParams(*(list(column) for column in zip(*rows))).rows(len(rows))


def logits_of(kind: str, vocab: int) -> np.ndarray:
    """Returns float32 logits [B, V], one row per entry of ROWS."""
    rng = np.random.default_rng(vocab)
    spread = rng.normal(0, 2, (len(ROWS), vocab))
    if kind == "ties":
        spread = np.round(spread)
    if kind == "flat":
        spread = np.zeros_like(spread)
    return spread.astype(np.float32)


@jax.jit
def to_probs_of_gpus(logits, rows):
    """Returns what `to_probs` returns, with the search for thresholds that GPUs get."""
    search = {"_BITS": probs_module._GPU_BITS, "_sum_after_sum": probs_module._all_sums}
    with mock.patch.multiple(probs_module, **search):
        return sampling.to_probs(logits, rows)


@pytest.mark.parametrize(
    ("function", "vocab"),
    [*((to_probs, vocab) for vocab in VOCABS), (to_probs_of_gpus, 3), (to_probs_of_gpus, 5000)],
)
@pytest.mark.parametrize("kind", ("spread", "ties", "flat"))
def test_to_probs_equals_sorted_reference(kind, function, vocab):
    logits = logits_of(kind, vocab)
    probs = np.asarray(function(logits, row_params()))
    assert probs.dtype == np.float32
    for row, values in enumerate(ROWS):
        expected = reference.to_probs(logits[row], **dict(zip(FIELDS, values)))
        np.testing.assert_array_equal(probs[row] > 0, expected > 1e-45, err_msg=str(values))
        np.testing.assert_allclose(probs[row], expected, rtol=2e-5, atol=1e-9, err_msg=str(values))


def test_to_probs_in_float64_is_exact():
    # With these weights the last bit decides whether a prefix reaches top_p.
    logits = np.log(np.asarray([[1, 2, 1, 4]] * 4)).astype(np.float64)
    rows = sampling.RowParams(*np.asarray([(1, 0, p, 0) for p in (0.5, 0.75, 0.876, 0.7)]).T)
    with jax.enable_x64(True):
        probs = np.asarray(to_probs(jnp.asarray(logits), rows))
    assert probs.dtype == np.float64
    kept = [[0, 0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]
    expected = np.asarray(kept) * [1, 2, 1, 4]
    expected = expected / expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probs, expected, atol=1e-15)


def test_to_probs_among_ties_keeps_the_lower_id():
    logits = np.asarray([[0, 1, 1, 1, 0, 1]], np.float32)

    def kept(**params):
        probs = to_probs(logits, SamplingParams(**params).rows(1))
        return np.flatnonzero(np.asarray(probs)[0]).tolist()

    assert kept(temperature=0.0) == [1]
    assert kept(top_k=1) == [1]
    assert kept(top_k=3) == [1, 2, 3]
    assert kept(top_k=5) == [0, 1, 2, 3, 5]
    assert kept(top_p=0.3) == [1, 2]
    assert kept(top_p=1e-9) == [1]
    # -0.0 and 0.0 tie too, though their bits differ.
    zeros = np.asarray([[-0.0, 0.0, 0.0, -0.0]], np.float32)
    for function in (sampling.to_probs, jax.jit(sampling.to_probs)):
        probs = function(zeros, SamplingParams(top_k=2).rows(1))
        assert np.flatnonzero(np.asarray(probs)[0]).tolist() == [0, 1]


def test_to_probs_with_middle_axes_uses_params_per_row():
    """`to_probs` takes logits with any middle axes, and uses the sampling parameters per row."""
    logits = np.random.default_rng(0).normal(0, 2, (len(ROWS), 3, 50)).astype(np.float32)
    together = np.asarray(to_probs(logits, row_params()))
    for node in range(3):
        alone = np.asarray(to_probs(logits[:, node], row_params()))
        np.testing.assert_array_equal(together[:, node], alone)
    for row, values in enumerate(ROWS):
        alone = np.asarray(to_probs(logits[row : row + 1], row_params([values])))
        np.testing.assert_array_equal(together[row : row + 1], alone, err_msg=str(values))


def test_to_probs_of_extreme_logits_is_finite():
    logits = np.asarray([[3e38, -3e38, 0.0], [-3e38, -3e38, -3.1e38]], np.float32)
    for temperature in (1e-30, 1.0, 1e30):
        probs = np.asarray(to_probs(logits, SamplingParams(temperature=temperature).rows(2)))
        np.testing.assert_allclose(probs.sum(axis=-1), 1, rtol=1e-6)


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_to_probs_of_non_finite_logit_is_all_nan(bad, temperature):
    """A logit that is not finite makes its whole distribution NaN, and no other distribution."""
    logits = np.zeros((2, 2, 4), np.float32)
    logits[1, 0, 2] = bad
    params = SamplingParams(temperature=temperature, top_k=2, top_p=0.9)
    probs = np.asarray(to_probs(logits, params.rows(2)))
    assert np.isnan(probs[1, 0]).all()
    assert np.isfinite(probs[[0, 0, 1], [0, 1, 1]]).all()


def test_to_probs_and_draw_compile_without_a_sort():
    """A sort of the vocabulary costs more than a whole pass of a small draft model."""
    probs = jnp.zeros((2, 5000))
    for function, args in (
        (sampling.to_probs, (probs, row_params(ROWS[:2]))),
        (sampling.draw, (probs, jnp.zeros((2, 2)))),
    ):
        text = jax.jit(function).lower(*args).as_text()
        assert not SORTS.search(text)
    for function in (jnp.sort, jnp.argsort, lambda x: jax.lax.top_k(x, 3)):
        assert SORTS.search(jax.jit(function).lower(probs).as_text())


@pytest.mark.parametrize("vocab", VOCABS)
def test_draw_inverts_cumulative_sums(vocab):
    """`draw` inverts the cumulative sums of blocks, then those of the tokens of one block."""
    rng = np.random.default_rng(vocab)
    weights = rng.integers(0, 4, (64, vocab)).astype(np.float32)  # every sum is exact
    weights[:, rng.integers(vocab)] += 1
    uniforms = np.floor(rng.random((64, 2)) * 2**23).astype(np.float32) / 2**23
    uniforms[:4] = [[0, 0], [0, UNIFORM_MAX], [UNIFORM_MAX, 0], [UNIFORM_MAX, UNIFORM_MAX]]
    drawn = np.asarray(draw(weights, uniforms))
    assert drawn.dtype == np.int32
    for row in range(64):
        blocks = np.split(weights[row], range(128, vocab, 128))
        block = inverse([block.sum() for block in blocks], uniforms[row, 0])
        assert drawn[row] == 128 * block + inverse(blocks[block], uniforms[row, 1])


def inverse(weights, uniform):
    """Returns the first index whose cumulative sum exceeds the level, rounded to float32."""
    ends = np.cumsum(weights, dtype=np.float64)
    level = np.float32(uniform * np.float32(ends[-1]))
    # For the largest u, u * total may round up to the total. Then the last token with weight wins.
    return min(np.searchsorted(ends, level, side="right"), np.flatnonzero(weights)[-1])


@pytest.mark.parametrize("vocab", (4096, pytest.param(32_000, marks=pytest.mark.slow)))
def test_draw_has_the_distribution_of_its_weights(vocab):
    """To 1e-5: bisects, over all float32 uniforms, to where a draw changes."""
    rng = np.random.default_rng(0)
    weights = rng.permutation(np.arange(1, vocab + 1) ** -1.5).astype(np.float32)
    draw = jax.vmap(functools.partial(sampling.draw, jnp.asarray(weights)))
    draw = jax.jit(draw, compiler_options=FAST)

    def masses(count, drawn_below):
        """Returns probabilities [count] of the outcomes of a draw that grows with its number."""
        low, high = np.zeros(count - 1, np.int64), np.full(count - 1, 2**23)
        while (low < high).any():
            middle = (low + high) // 2
            below = drawn_below((middle / 2**23).astype(np.float32), np.arange(count - 1))
            low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
        return np.diff(low / 2**23, prepend=0, append=1)

    zeros = np.zeros(vocab, np.float32)
    blocks = -(-vocab // 128)
    of_block = masses(
        blocks,
        lambda u, index: np.asarray(draw(np.stack([u, zeros[: len(u)]], -1))) // 128 <= index,
    )
    middles = np.cumsum(of_block) - of_block / 2
    distribution = np.zeros(vocab)
    for block in range(blocks):
        size = min(128, vocab - 128 * block)
        middle = np.full(size - 1, middles[block], np.float32)
        inside = masses(
            size, lambda u, index, at=middle: np.asarray(draw(np.stack([at, u], -1))) % 128 <= index
        )
        distribution[128 * block : 128 * block + size] = of_block[block] * inside
    expected = weights / weights.sum(dtype=np.float64)
    # One number for the whole vocabulary would leave 8e-5 and 6e-4 of total variation.
    assert 0.5 * np.abs(distribution - expected).sum() < 1e-5


def test_draw_at_extreme_uniforms_skips_zero_weights():
    """Uniforms at both ends of the unit interval draw no token of zero weight."""
    weights = np.zeros((3, 300), np.float32)
    weights[0, 170:180] = 1e-30
    weights[1, [5, 290]] = 0.3, 1e-6
    weights[2, 128] = 1
    np.testing.assert_array_equal(draw(weights, np.zeros((3, 2), np.float32)), [170, 5, 128])
    drawn = draw(weights, np.full((3, 2), UNIFORM_MAX, np.float32))
    np.testing.assert_array_equal(drawn, [179, 290, 128])


def test_draw_from_no_weight_is_a_token():
    """Verifiers draw before they know that nothing can be drawn, and discard the token."""
    drawn = draw(np.zeros((3, 300), np.float32), np.full((3, 2), 0.5, np.float32))
    assert 0 <= drawn[0] < 300


@pytest.mark.parametrize("level", (0, 1))
def test_draw_at_boundaries_skips_zero_weights(level):
    """Between blocks or between tokens, where rounding decides."""
    rng = np.random.default_rng(0)
    rows, blocks = 64, 24
    weights = rng.random((rows, blocks, 128)).astype(np.float32)
    weights[:, 5] = 0
    weights[:, :, :5] = 0
    weights[:, :, 60] = 0
    masses = (weights.sum(axis=-1, dtype=np.float64), weights[:, 0].astype(np.float64))[level]
    ends = np.cumsum(masses, axis=-1)
    share = ends / ends[:, -1:]
    flat = weights.reshape(rows, -1)
    for boundary in range(0, share.shape[1] - 1, 1 + 4 * level):
        for offset in range(-3, 4):
            aimed = np.clip(np.round(share[:, boundary] * 2**23) + offset, 0, 2**23 - 1) / 2**23
            uniforms = np.zeros((rows, 2), np.float32)
            uniforms[:, level] = aimed
            drawn = np.asarray(draw(flat, uniforms))
            assert (flat[np.arange(rows), drawn] > 0).all()


@functools.partial(jax.jit, static_argnums=(0, 1))
def uniforms_of(rows, count):
    """Returns the uniforms of the first rows of a batch."""
    return sampling.uniforms(sampling.row_keys(jax.random.key(0), rows), sampling.DRAFT, count)


def test_uniforms_do_not_depend_on_count_or_other_rows():
    five = np.asarray(uniforms_of(3, 5))
    np.testing.assert_array_equal(uniforms_of(3, 2), five[:, :2])
    np.testing.assert_array_equal(uniforms_of(8, 5)[:3], five)
    assert (five >= 0).all() and (five < 1).all()
