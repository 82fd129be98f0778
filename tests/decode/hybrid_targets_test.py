"""Targets with recurrent layers in the loop: their states are never cut back, and always right."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import Call, assert_same_texts, padded
from helpers.models import build_model
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

import spsjax
from spsjax import InputError, SamplingParams, decode, sampling
from spsjax.drafters import draft_model, ngram, sparse_self
from spsjax.drafters.contrib import early_exit, spire
from spsjax.loading import LoadedDrafter
from spsjax.models import caches as kv
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.parallel import sharding
from spsjax.utils.compilation import compiled

K = 3
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
SAMPLED, GREEDY = SamplingParams(), SamplingParams(temperature=0.0)
DELTA = {
    **{"mixer": "delta", "num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "value_dim": 6},
    **{"delta_taps": 4, "attention_gate": False, "qk_norm": False, "rotary_dim": 0},
}
HYBRID = {
    "num_layers": 3,
    "changes": (tuple(DELTA.items()), tuple(DELTA.items()), ()),
    **{"attention_gate": True, "qk_norm": True, "rotary_dim": 2, "norm_offset": 1.0},
    "norm_eps": 0.01,  # or norms of small outputs would magnify rounding
    "sharpness": 1.0,
}


def slow(case):
    """Returns a case of the full suite alone."""
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def hybrid():
    """A target of two gated delta nets and one layer of attention, whose rounding is small."""
    model = numpy_spread_model(48, **HYBRID)
    layers = jax.tree.map(
        lambda leaf: leaf * 0.6 if leaf.ndim > 1 else leaf, model.params["layers"]
    )
    return build_model(model.config, model.params | {"layers": layers}, None)


def drafter_of(name, hybrid, draft):
    """Returns a drafter of a chain or a tree.

    Early exits read the target's states themselves. The tree is that of a hybrid, too, which reads
    its nodes one after another.
    """
    if name == "early_exit":
        return LoadedDrafter(name, early_exit.Drafter(hybrid.config, Skipped((1,), (2,)), K), {})
    if name == "random_tree":
        draft = numpy_nearby_model(hybrid, distance=0.1)
    return drafting.build(name, draft, K)


def prefilled(program, params, tokens, lengths, keys):
    inputs = jax.device_put((SAMPLED.rows(4), tokens, lengths, np.full(4, 28, np.int32)))
    return compiled(decode.prompt.prefill, program, 32)(params, *inputs, keys)[0]


def assert_same_cache(cache, expected):
    """Asserts that states, and keys and values up to the lengths, are the same to 1e-5."""
    np.testing.assert_array_equal(cache.lengths, expected.lengths)

    def same(actual, right):
        size = max(1, np.abs(right).max(initial=0))
        np.testing.assert_allclose(actual, right, atol=1e-5 * size)

    for actual, right in zip(cache.keys + cache.values, expected.keys + expected.values):
        if isinstance(actual, kv.State):
            jax.tree.map(same, actual, right)
        elif actual is not None:
            held = np.arange(actual.shape[2]) < np.asarray(cache.lengths)[:, None]
            same(*(np.moveaxis(np.asarray(array), 1, 2)[held] for array in (actual, right)))


@pytest.mark.parametrize("name", ["early_exit", slow("draft_model"), "random_tree"])
def test_state_after_a_round_equals_a_fresh_prefill(hybrid, draft, name):
    """Chains and trees of which rows accept different numbers of tokens, and rows that are done."""
    loaded = drafter_of(name, hybrid, draft)
    program = decode.Program(hybrid.config, loaded.drafter, drafting.verifier(name))
    params = loaded.with_target(hybrid.params)
    keys = sampling.row_keys(jax.random.key(0), 4)
    with drafting.small_programs():
        state = prefilled(program, params, *padded(PROMPTS, 32, seed=0), keys)
        run = compiled(decode.step.run, program, donate=1)
        for _ in range(6):
            state, _ = run(params, state, np.int32(1))
            tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
            assert_same_cache(state.cache, prefilled(program, params, tokens, lengths, keys).cache)
    assert np.count_nonzero(np.asarray(state.accepted).sum(axis=0)) > 2
    assert len(set(lengths.tolist())) > 1


@pytest.mark.parametrize("name", [slow("ngram"), "early_exit", slow("draft_model"), "random_tree"])
def test_greedy_speculation_gives_the_text_of_the_target(hybrid, draft, name):
    options = {"sampling": GREEDY, "max_new_tokens": 20, "stop_at_eos": False}
    with drafting.small_programs():
        plain = spsjax.generate(hybrid, PROMPTS, **options)
        drafter = drafter_of(name, hybrid, draft)
        out = spsjax.generate(hybrid, PROMPTS, drafter, verifier=drafting.verifier(name), **options)
    assert_same_texts(out.tokens, plain.tokens)
    assert len({tuple(tokens) for tokens in out.tokens}) == len(PROMPTS)


@functools.partial(jax.jit, static_argnums=0)
def read_alone(config, params, tokens):
    output = transformer.apply(config, params, tokens)
    return transformer.empty_cache(config, params, 1, 32).extend(output)


@pytest.mark.parametrize("size", [8, 5])
def test_chunks_of_prompts_give_the_state_of_one_pass(hybrid, size):
    """Padding after shorter prompts reaches no state; a width that does not divide is replaced."""
    prompts = [list(range(1, 30)), [7, 7], list(range(8, 25))]
    whole = Call(hybrid, prompts, None)
    chunks = Call(hybrid, prompts, None, prefill_tokens=size)
    cache = chunks.prefill().cache
    assert_same_cache(cache, whole.prefill().cache)
    # Nor does it in one pass: a shorter prompt has the state of its tokens before the root.
    alone = read_alone(hybrid.config, hybrid.params, np.asarray([prompts[2][:-1]]))
    for state, right in zip(cache.keys, alone.keys):
        if isinstance(state, kv.State):
            np.testing.assert_allclose(state.memory[2], right.memory[0], atol=1e-4)
    width = decode.prompt.chunk_width(whole.slots, size, hybrid.config)
    assert width == {8: 8, 5: 4}[size] and whole.slots % width == 0


@pytest.mark.slow
def test_engine_gives_each_request_what_generate_gives(hybrid, draft):
    """Requests come and go in rows of one loop, so that states are inserted and moved."""
    rng, requests, expected = np.random.default_rng(0), [], []
    with drafting.small_programs():
        engine = spsjax.Engine(hybrid, ngram.Drafter(), 2, rows=2, slots=48, chunk=16, rounds=2)
        for seed in range(5):
            prompt = rng.integers(0, 48, rng.integers(1, 24)).tolist()
            requests.append(engine.submit(prompt, GREEDY, 12, seed))
            out = spsjax.generate(hybrid, [prompt], sampling=GREEDY, max_new_tokens=12)
            expected.append(out.tokens[0].tolist())
            engine.step()
        assert [request.result() for request in requests] == expected


@pytest.mark.parametrize("heads", [slow(4), 2])
def test_mesh_gives_the_tokens_of_one_device(hybrid, heads):
    """Four devices split value heads and key heads; two key heads are replicated."""
    changes = (tuple((DELTA | {"num_kv_heads": heads}).items()), ())
    config = dataclasses.replace(hybrid.config, changes=changes, num_layers=2)
    model = numpy_spread_model(48, **HYBRID | {"changes": config.changes, "num_layers": 2})
    split = build_model(model.config, model.params, sharding.mesh(2, 4))
    options = {"sampling": GREEDY, "max_new_tokens": 10, "stop_at_eos": False}
    with drafting.small_programs():
        plain = spsjax.generate(model, PROMPTS, ngram.Drafter(), K, **options)
        out = spsjax.generate(split, PROMPTS, ngram.Drafter(), K, **options)
    assert_same_texts(out.tokens, plain.tokens)
    for name, count in (("value", 4), ("key", 1 if heads == 2 else 4)):
        kernel = split.params["layers"][0]["attention"][name]["kernel"]
        parts = kernel.shape[1] // kernel.addressable_shards[0].data.shape[1]
        assert parts == (1 if heads == 2 else count)


def test_drafters_that_cut_states_back_are_refused(hybrid):
    expected = r"^{}: expected a model without recurrent layers, .* found one with gated delta nets"
    for name, make in (
        ("draft model", lambda: draft_model.Drafter(hybrid.config)),
        ("sparse_self", lambda: sparse_self.Drafter(hybrid.config)),
        ("spire", lambda: spire.Drafter(hybrid.config)),
        ("drafter", lambda: drafting.head("eagle", hybrid.config)),
    ):
        with pytest.raises(InputError, match=expected.format(name)):
            make()
    with pytest.raises(InputError, match=r"^recent: expected 0 in a model with recurrent layers"):
        dataclasses.replace(hybrid.config, recent=8)
    everywhere = (hybrid.config.changes[0],)
    with pytest.raises(InputError, match=r"^changes: expected a layer with keys and values"):
        dataclasses.replace(hybrid.config, changes=everywhere)
