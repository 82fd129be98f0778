"""Tests of layers in a loop: they compute what unrolled layers do, and nothing is copied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import FAMILIES
from helpers.numpy_models import numpy_spread_model

import spsjax
from spsjax import loading, tree
from spsjax.models import caches, layer_stack, quantization, transformer
from spsjax.utils import compilation

L = 3
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 20)).astype(np.int32)
PARENTS = np.asarray([[0, 0, 2], [0, 1, 0]], np.int32)
PATHS = np.asarray([[0, 2, 3, -1], [0, 1, -1, -1]], np.int32)


def model_of(family: str, **changes) -> loading.Model:
    """Returns a model of three layers."""
    fields = {"num_layers": L, "max_positions": 256} | FAMILIES[family] | changes
    return numpy_spread_model(48, **fields)


@functools.partial(jax.jit, static_argnums=(0, 1))
def passes(config, looped, params, tokens_BT, skips_BL2=None):
    """Returns the outputs of a prompt, a tree and a chain, each after the one before."""
    taps, shape = (0, 2, 2, L), (2, config.num_kv_heads, 64, config.head_dim)
    sizes = L, shape, jnp.float32, (None,) * L
    if config.recent:
        cache = caches.empty_window(*sizes, config.sinks, looped)
    else:
        cache = caches.empty(*sizes, looped)
    run = functools.partial(transformer.apply, config, params, tap_layers=taps)
    if skips_BL2 is not None:
        run = functools.partial(run, skipped=skips_BL2)
    first = run(tokens_BT[:, :14], looped=looped)
    cache = cache.extend(first)
    second = run(
        tokens_BT[:, 14:18],
        cache,
        positions_BT=cache.lengths[:, None] + tree.depths(PARENTS),
        ancestors=tree.ancestors(PARENTS),
    )
    lengths = cache.lengths + jnp.asarray([3, 2])
    cache = cache.write(second.block, PATHS, lengths, second.hidden)
    third = run(tokens_BT[:, 18:], cache)
    return [(output.logits, output.taps) for output in (first, second, third)]


def assert_equal(config, params, skips_BL2=None):
    """Compares a loop with unrolled layers."""
    expected = passes(config, False, params, TOKENS, skips_BL2)
    actual = passes(config, True, params, TOKENS, skips_BL2)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), actual, expected)


@pytest.mark.parametrize("family", ["rotary", "learned", "gemma"])
def test_loop_equals_unrolled_layers(family):
    """Windows and rotary frequencies differ between layers of "gemma"."""
    model = model_of(family)
    assert_equal(model.config, model.params)


def test_many_layers_run_in_a_loop_if_that_is_asked_for(monkeypatch):
    few = model_of("rotary").config
    many = dataclasses.replace(few, num_layers=30)
    assert not layer_stack.is_looped(many)
    layer_stack._asked_for.cache_clear()
    monkeypatch.setenv(layer_stack.VARIABLE, "loop")
    assert layer_stack.is_looped(many) and not layer_stack.is_looped(few)
    layer_stack._asked_for.cache_clear()
    monkeypatch.setenv(layer_stack.VARIABLE, "lop")
    with pytest.raises(spsjax.InputError, match="SPSJAX_LAYERS: expected unrolled or loop, found"):
        layer_stack.is_looped(many)


def test_loop_equals_unrolled_layers_with_a_window_cache():
    model = model_of("rotary")
    assert_equal(dataclasses.replace(model.config, sinks=2, recent=6), model.params)


def test_loop_in_int8_with_skips_equals_unrolled_layers():
    model = model_of("rotary")
    params = quantization.quantize(model.params, "int8", model.config.tie_embeddings)
    skips = np.random.default_rng(1).integers(0, 2, (2, L, 2)).astype(bool)
    assert_equal(model.config, params, skips)


def test_matrix_of_a_layer_is_not_copied():
    """A matrix is read by one product of a branch, and no other operation has its size."""
    model = model_of("rotary", d_ff=56)

    def loop(params, tokens_BT):
        return transformer.apply(model.config, params, tokens_BT, looped=True).logits

    text = jax.jit(loop).lower(model.params, TOKENS).compile().as_text()
    made = [line for line in text.splitlines() if f"= f32[{model.config.d_model},56]" in line]
    assert made and all("parameter(" in line or "get-tuple-element(" in line for line in made)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft", "sparse_self:12:chosen", "early_exit:2"])
def test_generate_samples_the_same_in_a_loop(name, monkeypatch):
    """Drafts run in a loop, too, and an early exit unrolls the target's stacked cache."""
    target = model_of("rotary")
    drafter = model_of("rotary", num_layers=2) if name == "draft" else name
    drafter = spsjax.load_drafter(drafter, target) if isinstance(drafter, str) else drafter

    def tokens(looped):
        monkeypatch.setattr(layer_stack, "is_looped", lambda config: looped)
        compilation.clear()  # equal programs share what is compiled
        out = spsjax.generate(target, [[5, 6, 7], [1] * 150], drafter, max_new_tokens=24, seed=3)
        return [row.tolist() for row in out.tokens]

    assert tokens(looped=True) == tokens(looped=False)
