"""Caches that are windows: what they hold, what a model sees of them, and what SnapKV chooses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import FAMILIES, tiny_config
from helpers.numpy_models import numpy_spread_model

from spsjax import InputError, decode
from spsjax.drafters import sparse_self
from spsjax.models import caches, transformer
from spsjax.models.config import Config
from spsjax.types import Round

SINKS, RECENT, LENGTH = 2, 5, 85
apply = jax.jit(transformer.apply, static_argnums=0)
empty_window = jax.jit(caches.empty_window, static_argnums=range(4))
empty_block = jax.jit(caches.empty_block, static_argnums=range(2))
filled = jax.jit(caches.WindowCache.filled)


def windowed(config: Config, sinks=SINKS, recent=RECENT) -> Config:
    return dataclasses.replace(config, sinks=sinks, recent=recent)


def tokens_of(rows: int, length: int = LENGTH, seed: int = 0):
    return np.random.default_rng(seed).integers(0, 48, (rows, length)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def empty_cache(config, params):
    return transformer.empty_cache(config, params, 2, LENGTH)


@functools.partial(jax.jit, static_argnums=0)
def fed(config, params, cache, tokens):
    """Returns the logits of some tokens, and the cache with them."""
    output = transformer.apply(config, params, tokens, cache)
    ends = cache.lengths + tokens.shape[1]
    return output.logits, cache.write(output.block, None, ends, output.hidden)


IN_GATE = ("relative", SINKS), ("gemma", SINKS)
IN_FULL = ("latent", SINKS), ("rotary", SINKS), ("learned", SINKS), ("relative", 0), ("gemma", 0)


@pytest.mark.parametrize(
    ("family", "sinks"),
    [*IN_GATE, *(pytest.param(*case, marks=pytest.mark.slow) for case in IN_FULL)],
)
def test_window_in_chunks_equals_a_pass_over_the_text(family, sinks):
    """The ring turns more than once; the first and the last chunk are longer than it."""
    changes = FAMILIES[family] | ({"windows": (4, 0)} if family == "gemma" else {})
    target = numpy_spread_model(48, **{"num_layers": 2, "max_positions": 128} | changes)
    config = windowed(target.config, sinks)
    tokens = tokens_of(2)
    expected = np.asarray(apply(config, target.params, tokens).logits)
    cache = empty_cache(config, target.params)
    assert isinstance(cache, caches.WindowCache) and cache.num_slots < LENGTH // 2
    actual = []
    for start, end in ((0, 40), (40, 41), (41, 45), (45, 85)):
        logits, cache = fed(config, target.params, cache, tokens[:, start:end])
        actual.append(logits)
    np.testing.assert_allclose(np.concatenate(actual, axis=1), expected, atol=2e-4)
    others = tokens.copy()
    others[:, SINKS:40] = (others[:, SINKS:40] + 1) % 48
    other = np.asarray(apply(config, target.params, others).logits)
    np.testing.assert_allclose(other[:, 60:], expected[:, 60:], atol=2e-4)
    assert np.abs(other - expected).max() > 0.1


def test_token_sees_the_sinks_and_the_window_alone():
    """Of one layer, a logit depends on a token just if that is seen."""
    target = numpy_spread_model(48)
    config, tokens = windowed(target.config), tokens_of(1, 14)
    same = np.repeat(tokens, 14, axis=0)
    others = (same + np.eye(14, dtype=np.int32)) % 48
    some, more = (np.asarray(apply(config, target.params, text).logits) for text in (same, others))
    change = more - some
    depends = np.abs(change).max(axis=-1).T > 1e-6  # [token, changed token]
    token, other = np.indices((14, 14))
    seen = (other <= token) & ((other < SINKS) | (other > token - RECENT))
    np.testing.assert_array_equal(depends, seen)


def test_sinks_are_as_near_as_if_the_window_followed_them():
    """Of one layer with rotary positions: as if the middle of the text were not there."""
    target = numpy_spread_model(48)
    config, tokens = windowed(target.config), tokens_of(2, 40)
    short = np.concatenate([tokens[:, :SINKS], tokens[:, -RECENT:]], axis=1)
    bare = dataclasses.replace(config, sinks=0)
    actual, expected, other = (
        np.asarray(apply(config, target.params, text).logits)[:, -1]
        for config, text in ((config, tokens), (target.config, short), (bare, tokens))
    )
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert np.abs(actual - other).max() > 1e-2


@pytest.mark.parametrize("back", (0, 4, 32))
def test_window_that_is_set_back_equals_a_fresh_one(back):
    """Rows go back by different amounts after tokens that were rejected, and go on exactly."""
    target = numpy_spread_model(48, num_layers=2, max_positions=128)
    config, tokens, rejected = windowed(target.config), tokens_of(2), tokens_of(2, 112, seed=1)
    expected = np.asarray(apply(config, target.params, tokens).logits)
    cache = empty_cache(config, target.params)
    for start in (0, 40):
        _, cache = fed(config, target.params, cache, tokens[:, start : start + 40])
    for start in range(80, 80 + back, 4):
        _, cache = fed(config, target.params, cache, rejected[:, start : start + 4])
    kept = np.asarray([80, 80 + back - 32])
    cache = cache.at(kept)
    positions = kept[:, None] + range(4)
    logits, _ = fed(config, target.params, cache, tokens[np.arange(2)[:, None], positions])
    for row, start in enumerate(kept):
        np.testing.assert_allclose(logits[row], expected[row, start : start + 4], atol=2e-4)


@jax.jit
def written(cache, block, path, lengths, hidden):
    return cache.write(block, path, lengths, hidden)


def test_path_of_a_tree_is_written_and_the_rest_is_not():
    cache = empty_window((((2, 1, 8, 2),) * 2,), jnp.float32, (None,), 2)
    numbers = np.repeat(np.arange(10, dtype=np.float32).reshape(2, 1, 5, 1), 2, axis=-1)
    positions = np.asarray([[0, 1, 1, 2, 2], [9, 10, 10, 11, 11]])
    block = empty_block((((2, 1, 5, 2),) * 2,), jnp.float32)
    block = dataclasses.replace(block, keys=(numbers,), values=(-numbers,), positions=positions)
    path = np.asarray([[0, 2, 4], [0, 1, -1]])
    after = np.zeros((2, 5, 3), np.float32)
    cache = written(cache.at(np.asarray([0, 9])), block, path, np.asarray([3, 10]), after)
    cache = jax.device_get(cache)
    np.testing.assert_array_equal(cache.keys[0][0, 0, :3, 0], [0, 2, 4])
    np.testing.assert_array_equal(cache.slot_positions[0], [0, 1, 2, -1, -1, -1, -1, -1])
    # Position 9 is in slot 2 + (9 - 2) % 6; the second node of the path was not kept.
    np.testing.assert_array_equal(cache.slot_positions[1], [-1, -1, -1, 9, -1, -1, -1, -1])
    assert float(cache.values[0][1, 0, 3, 0]) == -5
    np.testing.assert_array_equal(cache.positions()[1], cache.slot_positions[1])


def test_chunks_of_prompts_set_a_window_back_by_few_tokens():
    """The last chunk repeats tokens of the one before: never more than a window can be set back."""
    for tokens in (1, 31, 192, 1025, 1536, 12_288, 24_576, 49_152, 99_991):
        for most in (16, 37, 85, 341, 1024):
            width = decode.prompt.chunk_width(tokens, most, tiny_config(48))
            assert min(most // 2, tokens) < width <= most or width == tokens <= most
            assert -tokens % width <= caches.SLACK


def test_filled_window_holds_what_a_written_one_does():
    for length in (1, 3, 8, 9, 21):
        cache = empty_window((((1, 1, 8, 2),) * 2,), jnp.float32, (None,), 2)
        block = empty_block((((1, 1, length, 2),) * 2,), jnp.float32)
        block = dataclasses.replace(block, positions=np.arange(length)[None])
        lengths, hidden = np.asarray([length]), np.zeros((1, length, 1), np.float32)
        positions = written(cache, block, None, lengths, hidden).slot_positions
        np.testing.assert_array_equal(filled(cache, lengths).slot_positions, positions)


def direct_choice(target, tokens, length, sinks, chosen, observed, pooled):
    """Returns the positions that SnapKV chooses by key-value head, for one rotary layer."""
    config, params = target.config, jax.tree.map(np.asarray, target.params)
    layer, C = params["layers"][0], config.head_dim
    x = params["embed"]["embedding"][tokens[:length]].astype(np.float64)
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.norm_eps)
    x = x * layer["attention_norm"]["scale"]
    angles = np.arange(length)[:, None] / config.rope_theta ** (np.arange(0, C, 2) / C)
    turns = np.exp(1j * angles)[:, None]

    def rotated(name, heads):
        y = (x @ layer["attention"][name]["kernel"]).reshape(length, heads, C)
        return (y[..., : C // 2] + 1j * y[..., C // 2 :]) * turns

    query, key = rotated("query", config.num_heads), rotated("key", config.num_kv_heads)
    groups = []
    for group in range(config.num_kv_heads):
        share = config.num_heads // config.num_kv_heads
        total = np.zeros(length)
        for head in range(group * share, (group + 1) * share):
            for t in range(length - observed, length):
                scores = np.real(query[t, head] * key[: t + 1, group].conj()).sum(-1) / np.sqrt(C)
                weights = np.exp(scores - scores.max())
                # What the observed tokens give each other is not counted.
                total[: length - observed] += (weights / weights.sum())[: length - observed]
        half = pooled // 2
        smooth = [total[max(i - half, 0) : i + half + 1].sum() for i in range(length)]
        free = range(sinks, length - observed)
        groups.append({*sorted(free, key=lambda i: -smooth[i])[:chosen]})
    return groups


@functools.partial(jax.jit, static_argnums=0)
def choice(drafter, params, tokens, length):
    """Returns the whole cache, and the window with the tokens that are chosen of it."""
    config, shape = drafter.target, (1, 2, 64, drafter.target.head_dim)
    whole = caches.empty([(shape, shape)], jnp.float32)
    _, whole = fed(config, params, whole, tokens)
    whole = whole.at(length)
    shape = (1, 2, 32, config.head_dim)
    window = caches.empty_window([(shape, shape)], jnp.float32, (None,), drafter.sinks).filled(
        length
    )
    window = caches.with_chosen_slots(window, drafter.chosen)
    now = Round(tokens, length + 1, None, None, whole)
    return whole, drafter.sync({"target": params}, window, now)


@pytest.mark.parametrize(("chosen", "length"), [(6, 40), (6, 33), (50, 40)])
def test_choice_is_that_of_direct_attention(chosen, length):
    """With more room than tokens, all of them are chosen, and the other slots stay empty."""
    sinks, recent, observed, pooled = 1, 10, 8, 3
    target = numpy_spread_model(48, num_kv_heads=2)
    tokens, config = tokens_of(1, 40, seed=3), target.config
    drafter = sparse_self.Drafter(
        config, 3, sinks, recent, chosen, observed=observed, pooled=pooled
    )
    whole, state = jax.device_get(choice(drafter, target.params, tokens, np.asarray([length])))
    expected = direct_choice(target, tokens[0], length, sinks, chosen, observed, pooled)
    count = min(chosen, length - observed - sinks)
    np.testing.assert_array_equal(state.chosen[0], np.arange(chosen) < count)
    # Beside the choice, the window holds the sinks and the observed tokens alone.
    held = sorted(set(state.slot_positions[0].tolist()) - {-1})
    assert held == [0, *range(length - observed, length)]
    for group, positions in enumerate(expected):
        keys, actual = whole.keys[0][0, group], state.chosen_keys[0][0, group, :count]
        distance = np.abs(actual[:, None] - keys[None, :length]).max(-1)
        assert {*distance.argmin(axis=1).tolist()} == positions
        assert distance.min(axis=1).max() == 0


def test_sinks_without_a_window_are_refused():
    with pytest.raises(InputError, match=r"^recent, sinks: expected"):
        dataclasses.replace(numpy_spread_model(48).config, sinks=2)
