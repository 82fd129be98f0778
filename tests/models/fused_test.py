"""Kernels of a decode step, interpreted, against the plain XLA code that specifies them."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bad_input import one_line
from helpers.models import build_model, spread_params, tiny_config

import spsjax
from spsjax import SamplingParams
from spsjax.drafters import draft_model
from spsjax.errors import InputError
from spsjax.loading import LoadedDrafter
from spsjax.models import attention, quantization, transformer
from spsjax.models.caches import Segment
from spsjax.models.fused import attention as kernels
from spsjax.models.fused import layer, writes
from spsjax.utils import compilation, kernel_choice
from spsjax.utils.kernel_choice import KERNELS

PLAIN = tiny_config(64, num_layers=1, d_model=48, num_heads=6, num_kv_heads=2, head_dim=16, d_ff=80)
CHANGES = {
    "llama": {},
    "qwen2": {"biases": "qkv", "head_dim": 80},
    "qwen3": {"qk_norm": True, "head_dim": 24},
    "gemma": {
        "ffn": "geglu",
        "d_ff": 2100,  # columns of one program: 32
        "norm_offset": 1.0,
        "attention_softcap": 5.0,
        "windows": (8,),
        "num_kv_heads": 1,
    },
    "gpt2": {
        "positions": "learned",
        "norm": "layer",
        "ffn": "gelu",
        "d_ff": 4100,  # columns of one program: 64, with a rest
        "biases": "all",
        "num_kv_heads": 6,
    },
}


def random_segments(rng, queries, heads, slots, nodes, *, width=16, window=0, dtype=np.float32):
    """Returns a cache of rows of random lengths, and a random tree."""
    B, T = queries

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    lengths = rng.integers(1, slots, B)[:, None, None]
    slot = np.arange(slots)
    cached = np.broadcast_to(slot < lengths, (B, 1, slots))
    if window:
        cached = cached & (slot > lengths + np.arange(T)[:, None] - window)
    ancestors = rng.random((B, T, nodes)) < 0.5
    ancestors[:, :, 0] = True
    # Slots that nothing sees have stale keys.
    keys = jnp.where((slot < lengths)[..., None], array(B, heads, slots, width), jnp.nan)
    positions = jnp.zeros((B, slots), jnp.int32), jnp.zeros((B, nodes), jnp.int32)
    return [
        Segment(keys, array(B, heads, slots, width), jnp.asarray(cached), positions[0], None),
        Segment(
            array(B, heads, nodes, width),
            array(B, heads, nodes, width),
            jnp.asarray(ancestors),
            positions[1],
            None,
        ),
    ]


@pytest.mark.parametrize(
    "queries, heads, slots, nodes, settings",
    [
        pytest.param((2, 1), (6, 2), 300, 1, {}, id="one token, shared slots"),
        pytest.param((2, 5), (4, 1), 200, 7, {"width": 24, "softcap": 5.0}, id="tree, soft cap"),
        pytest.param((1, 40), (8, 2), 130, 64, {"window": 50}, id="several tiles, window"),
        pytest.param((3, 3), (2, 2), 10, 3, {"width": 8}, id="one share"),
    ],
)
def test_attention_equals_its_specification(queries, heads, slots, nodes, settings):
    rng, settings = np.random.default_rng(0), dict(settings)
    softcap = settings.pop("softcap", 0.0)
    segments = random_segments(rng, queries, heads[1], slots, nodes, **settings)
    query = jnp.asarray(rng.normal(size=(*queries, heads[0], segments[0].keys.shape[3])), "float32")
    expected = attention.attend(query, segments, [None, None], 0.3, softcap)
    assert kernels.supports(query, segments)
    found = kernels.attend(query, segments, 0.3, softcap, interpret=True)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_attention_to_nothing_is_not_a_number_as_specified():
    rng = np.random.default_rng(1)
    segments = random_segments(rng, (1, 2), 1, 20, 2)
    segments = [
        dataclasses.replace(segment, visible=jnp.zeros_like(segment.visible))
        for segment in segments
    ]
    query = jnp.asarray(rng.normal(size=(1, 2, 2, 16)), "float32")
    expected = attention.attend(query, segments, [None, None], 1.0)
    np.testing.assert_array_equal(kernels.attend(query, segments, 1.0, interpret=True), expected)
    assert np.all(np.isnan(expected))


@functools.lru_cache
def cached_pass(name: str, dtype, quantize=None):
    """Returns a model, a cache with rows of two lengths, and the tokens that follow."""
    config = dataclasses.replace(PLAIN, **CHANGES[name])
    params = transformer.init(config, jax.random.key(0))
    noise = np.random.default_rng(2)

    def moved(leaf):  # scales and biases that are not ones and zeros
        spread = 0.3 if leaf.ndim == 1 else 0.0
        return (leaf + spread * noise.normal(size=leaf.shape)).astype(dtype)

    params = jax.tree.map(moved, params)
    if quantize:
        params = quantization.quantize(params, quantize, config.tie_embeddings)
    tokens = jnp.asarray(noise.integers(0, 64, (2, 34)))
    cache = transformer.empty_cache(config, params, 2, 48)
    output = transformer.apply(config, params, tokens[:, :29], cache)
    return config, params, cache.extend(output, jnp.asarray([29, 22])), tokens[:, 28:]


def both_passes(name: str, dtype=jnp.float32, quantize=None, steps=1):
    """Returns logits, block and written cache by plain code and by kernels.

    The tokens are read in one pass, or in several steps of a draft, which extend a block.
    """
    config, params, cache, tokens = cached_pass(name, dtype, quantize)

    @jax.jit
    def run(params, cache, tokens):
        block = transformer.empty_block(config, params, 2, 7) if steps > 1 else None
        for part in jnp.split(tokens, steps, axis=1):
            output = transformer.apply(config, params, part, cache, block=block)
            block = output.block if steps > 1 else None
        path = jnp.asarray([[0, 2, -1], [0, -1, -1]])
        after = cache.write(output.block, path, cache.lengths + 1, output.hidden)
        return output.logits, output.block.keys, output.block.values, after.keys, after.values

    plain = run(params, cache, tokens)
    with KERNELS("interpret"):
        traced = str(run.trace(params, cache, tokens).jaxpr)
        for kernel in ("heads", "attend", "added", "activated", "write"):
            assert f"name={kernel}\n" in traced, kernel
        return plain, run(params, cache, tokens)


@pytest.mark.parametrize(
    "name, settings",
    [*((name, {}) for name in CHANGES), ("llama", {"quantize": "int8"}), ("llama", {"steps": 2})],
    ids=str,
)
def test_layer_equals_its_specification(name, settings):
    plain, fused = both_passes(name, **settings)
    for expected, found in zip(jax.tree.leaves(plain), jax.tree.leaves(fused), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_kernels_round_bfloat16_no_worse_than_plain_code():
    exact = both_passes("qwen3")[0][0]
    errors = [
        np.sqrt(np.mean((np.float32(logits) - exact) ** 2))
        for logits, *_ in both_passes("qwen3", jnp.bfloat16)
    ]
    assert 0 < errors[1] < 1.2 * errors[0]


@pytest.mark.slow
def test_texts_of_loops_equal_those_of_plain_code(monkeypatch):
    """Chains and trees, greedy and sampled rows. The shapes occur only here."""
    changes = {"num_layers": 2, "d_model": 40, "head_dim": 10, "num_heads": 4, "d_ff": 48}
    target, draft = (
        build_model(config, spread_params(config, seed), None)
        for seed, config in enumerate(tiny_config(61, **changes, num_kv_heads=kv) for kv in (2, 1))
    )
    prompts = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2]]
    params = SamplingParams(temperature=[0.0, 1.0, 0.7], top_p=[1.0, 0.9, 1.0])
    fields = {"num_speculative_tokens": 3}, {"tree": spsjax.Tree.branching(2, 2)}
    methods = [
        LoadedDrafter("draft", draft_model.Drafter(draft.config, **own), draft.params)
        for own in fields
    ]
    texts = {}
    for mode in ("off", "interpret"):
        monkeypatch.setenv(kernel_choice.VARIABLE, mode)
        compilation.clear()
        outputs = [spsjax.generate(target, prompts, method, None, params, 24) for method in methods]
        texts[mode] = [[row.tolist() for row in output.tokens] for output in outputs]
    assert texts["off"] == texts["interpret"]
    assert texts["off"][0] != texts["off"][1]  # sampled rows of a chain and of a tree


def test_gradients_are_those_of_plain_code():
    def square(x):
        return jnp.sum(x * x)

    def triple(x, interpret=False):
        return 3 * jnp.sum(jax.lax.stop_gradient(x) ** 2)

    with KERNELS("interpret"):
        function = kernel_choice.chosen(triple, square)
        assert function(jnp.ones(2)) == 6
        np.testing.assert_array_equal(jax.grad(function)(jnp.ones(2)), [2, 2])
    assert kernel_choice.chosen(triple, square) is square


@pytest.mark.parametrize("mode", ["off", "interpret"])
def test_rows_may_skip_sub_layers(mode):
    """They run the plain code: a row that skips nothing has the output of a pass without skips."""
    config, params, cache, tokens = cached_pass("llama", jnp.float32)
    skipped = jnp.asarray([[[False, False]], [[True, False]]])
    with KERNELS(mode):
        logits = transformer.apply(config, params, tokens, cache, skipped=skipped).logits
    whole = transformer.apply(config, params, tokens, cache).logits
    np.testing.assert_allclose(logits[0], whole[0], atol=1e-5)
    assert np.any(abs(logits[1] - whole[1]) > 1e-3)


def test_write_beyond_the_last_slot_harms_its_own_row_only():
    """A NaN in the hidden state raises the bound of the first slot (`KVCache.write`)."""
    buffers = {0: jnp.zeros((2, 2, 6, 1))}
    rows, starts = {0: jnp.ones((2, 2, 2, 1))}, jnp.asarray([4, 5])
    found = writes.write(buffers, rows, starts, interpret=True)[0]
    np.testing.assert_array_equal(found[:, :, :, 0], np.broadcast_to([0, 0, 0, 0, 1, 1], (2, 2, 6)))
    assert not writes.supports({0: jnp.zeros((2, 2, 1, 1))}, rows)
    assert not writes.supports({0: jnp.zeros((2, 2, 6, 0))}, {0: jnp.zeros((2, 2, 2, 0))})


def test_jax_without_pallas_for_triton_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(
        kernel_choice.importlib, "import_module", mock.Mock(side_effect=ImportError("no"))
    )
    assert kernel_choice.kernels_of("attention") is None  # kernels are off
    with KERNELS("on"), one_line("SPSJAX_KERNELS: expected a JAX with Pallas for Triton", "no"):
        kernel_choice.kernels_of("attention")


def test_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv(kernel_choice.VARIABLE, "yes")
    with pytest.raises(
        InputError, match="SPSJAX_KERNELS: expected off, on, interpret, found 'yes'"
    ):
        kernel_choice.mode()


@pytest.mark.parametrize(
    "changes",
    [
        {"post_norms": True},
        {"positions": "relative"},
        {"rotary_dim": 8},
        {"rope_interleaved": True},
        {"num_experts": 2, "experts_per_token": 1},
        {"d_ff": 2**19},
    ],
    ids=str,
)
def test_other_layers_stay_plain(changes):
    config = dataclasses.replace(PLAIN, **changes)
    assert layer.supports(PLAIN, {}, jnp.zeros((2, 32, 48)))
    assert not layer.supports(PLAIN, {}, jnp.zeros((2, 33, 48)))
    assert not layer.supports(config, {}, jnp.zeros((2, 1, 48)))
