"""Tests of relative positions, which `transformers` does not have, against a direct form in NumPy.

The other models are compared with `transformers` in `families_test.py` and `huggingface_test.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import build_model, tiny_config
from helpers.numpy_models import numpy_nearby_model, numpy_spread_params

import spsjax
from spsjax import InputError, loading
from spsjax.models import attention, caches, self_attention, transformer
from spsjax.parallel import sharding

VOCAB, LENGTH = 24, 13
SHAPE = {"positions": "relative", "ffn": "gelu", "num_layers": 2, "d_model": 16, "d_ff": 64}
CONFIGS = [
    tiny_config(VOCAB, **SHAPE, num_kv_heads=8, tie_embeddings=True),
    tiny_config(VOCAB, **SHAPE, num_kv_heads=2),
]


def params_of(config, seed=0):
    """Returns spread parameters, with attention biases that are not zero."""
    params = numpy_spread_params(config, seed)
    rng = np.random.default_rng(seed + 1)
    for layer in params["layers"].values():
        for name in ("content_bias", "position_bias"):
            layer["attention"][name] = rng.normal(size=(8, config.head_dim)).astype(np.float32)
    return params


def direct(config, params, tokens):
    """Computes float64 logits [T, V] by section 3.3 of Transformer-XL (arXiv 1901.02860)."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    H, C, D = config.num_heads, config.head_dim, config.d_model

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.norm_eps) * scale["scale"]

    def sinusoid(distance):
        angles = distance / 10_000 ** (np.arange(0, D, 2) / D)
        return np.concatenate([np.sin(angles), np.cos(angles)])

    x = params["embed"]["embedding"][tokens]
    for index in range(config.num_layers):
        layer = params["layers"][index]
        weights = layer["attention"]
        h = norm(x, layer["attention_norm"])
        query = (h @ weights["query"]["kernel"]).reshape(-1, H, C)
        key = (h @ weights["key"]["kernel"]).reshape(-1, config.num_kv_heads, C)
        value = (h @ weights["value"]["kernel"]).reshape(-1, config.num_kv_heads, C)
        mixed = np.zeros((len(tokens), H, C))
        for i in range(len(tokens)):
            for head in range(H):
                group = head * config.num_kv_heads // H
                scores = np.zeros(i + 1)
                for j in range(i + 1):
                    relative = (sinusoid(i - j) @ weights["position"]["kernel"]).reshape(H, C)
                    content = query[i, head] + weights["content_bias"][head]
                    position = query[i, head] + weights["position_bias"][head]
                    scores[j] = content @ key[j, group] + position @ relative[head]
                scores = np.exp(scores / np.sqrt(C))
                mixed[i, head] = scores @ value[: i + 1, group] / scores.sum()
        x = x + mixed.reshape(len(tokens), -1) @ weights["out"]["kernel"]
        up = norm(x, layer["ffn_norm"]) @ layer["ffn"]["up"]["kernel"]
        gelu = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + gelu @ layer["ffn"]["down"]["kernel"]
    x = norm(x, params["norm"])
    head = params["embed"]["embedding"].T if config.tie_embeddings else params["head"]["kernel"]
    return x @ head


@functools.partial(jax.jit, static_argnums=0)
def read(config, params, cache, tokens):
    """Runs `tokens` [B, T] after the cached ones, and returns their logits and the new cache."""
    output = transformer.apply(config, params, tokens, cache)
    return output.logits, cache.extend(output)


@functools.partial(jax.jit, static_argnums=0)
def empty_cache(config, params):
    """Returns a cache of two rows: as long as the text, or longer."""
    return transformer.empty_cache(config, params, 2, LENGTH if config == CONFIGS[0] else 32)


def feed(config, params, cache, tokens):
    """Runs `tokens` [T] after the cached ones of every row."""
    tokens = np.broadcast_to(np.asarray(tokens), (len(cache.lengths), len(tokens)))
    logits, cache = read(config, params, cache, tokens)
    return np.asarray(logits), cache


apply = jax.jit(transformer.apply, static_argnums=0)


@pytest.fixture(scope="module", params=CONFIGS, ids=["one head per group", "grouped"])
def case(request):
    """A tuple (config, parameters, tokens, logits of the direct form)."""
    config = request.param
    params = params_of(config)
    tokens = np.random.default_rng(0).integers(0, VOCAB, LENGTH)
    return config, params, tokens, direct(config, params, tokens)


def test_relative_attention_equals_transformer_xl_formula(case):
    config, params, tokens, expected = case
    logits = apply(config, params, tokens[None]).logits[0]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.std(expected) > 0.5


def test_apply_with_a_cache_of_any_size_is_unchanged(case):
    config, params, tokens, expected = case
    cache = empty_cache(config, params)
    for start, end in ((0, 4), (4, 5), (5, 9), (9, 13)):
        logits, cache = feed(config, params, cache, tokens[start:end])
        np.testing.assert_allclose(logits[0], expected[start:end], atol=1e-4)


def test_apply_with_a_cache_reads_no_position_weights(case):
    """The weights that project positions are read when a cache is made, and not by later passes."""
    # `lower_bound` in `performance/roofline.py` counts the weights so.
    config, params, tokens, expected = case
    _, cache = feed(config, params, empty_cache(config, params), tokens[:4])
    broken = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            np.full_like(leaf, np.nan) if any(x.key == "position" for x in path) else leaf
        ),
        params,
    )
    logits, _ = feed(config, broken, cache, tokens[4:8])
    np.testing.assert_allclose(logits[0], expected[4:8], atol=1e-4)
    assert np.isnan(feed(config, broken, empty_cache(config, broken), tokens[:4])[0]).all()


def test_rows_rolled_back_by_other_amounts_continue_exactly(case):
    """Rows that roll back by different amounts continue as if nothing had been rejected."""
    config, params, tokens, expected = case
    cache = empty_cache(config, params)
    _, cache = feed(config, params, cache, tokens[:4])
    _, cache = feed(config, params, cache, tokens[4:8])
    _, cache = feed(config, params, cache, (tokens[8:12] + 1) % VOCAB)  # rejected
    kept = np.asarray([8, 5])
    cache = cache.at(kept)
    positions = kept[:, None] + np.arange(4)
    logits, _ = read(config, params, cache, tokens[positions])
    np.testing.assert_allclose(logits, expected[positions], atol=1e-4)


@pytest.fixture(scope="module")
def pair():
    """A target and a draft of relative positions, on one device."""
    target = build_model(CONFIGS[0], params_of(CONFIGS[0]), None)
    return target, numpy_nearby_model(target)


@pytest.mark.slow
def test_relative_model_on_a_mesh_gives_the_logits_of_one_device(case):
    """Heads and their biases are split, in passes with and without a cache."""
    config, params, tokens, expected = case
    model = build_model(config, params, sharding.mesh(2, 4))
    assert not model.params["layers"][0]["attention"]["position_bias"].is_fully_replicated
    with model.in_mesh():
        cache = empty_cache(config, model.params)
        for start, end in ((0, 9), (9, 13)):
            logits, cache = feed(config, model.params, cache, tokens[start:end])
            np.testing.assert_allclose(logits[0], expected[start:end], atol=1e-4)
        logits = apply(config, model.params, np.stack([tokens] * 2)).logits
    np.testing.assert_allclose(logits[1], expected, atol=1e-4)


def test_saved_relative_model_loads_unchanged(pair, tmp_path):
    model = pair[0]
    loading.save(tmp_path, model, dtype="float32")
    loaded = spsjax.load(str(tmp_path))
    assert loaded.config == model.config
    assert all(map(np.array_equal, jax.tree.leaves(loaded.params), jax.tree.leaves(model.params)))


@jax.jit
def attend(query, segment):
    return attention.attend(query, [segment], [None], 0.5)


def test_shared_segment_is_attended_to_like_a_copy_for_each_row():
    """Six rows of queries read two rows of keys, three each, and see different parts of them."""
    rng = np.random.default_rng(0)
    query, keys, values = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((6, 2, 8, 4), (2, 4, 5, 4), (2, 4, 5, 4))
    )
    visible, positions = rng.random((6, 2, 5)) < 0.7, np.zeros((6, 5), np.int32)
    visible[:, :, 0] = True
    shared = caches.Segment(keys, values, visible, positions, None)
    copied = caches.Segment(
        np.repeat(keys, 3, axis=0), np.repeat(values, 3, axis=0), visible, positions, None
    )
    for rows in (slice(None), slice(0, 1)):  # one query of several heads per key takes another path
        actual, expected = (
            attend(query[:, rows], part(segment, rows)) for segment in (shared, copied)
        )
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def part(segment, rows):
    return dataclasses.replace(segment, visible=segment.visible[:, rows])


@pytest.mark.parametrize(
    "changes",
    ({"num_layers": 2, "windows": (4, 0), "attention_softcap": 5.0}, {"sinks": 2, "recent": 5}),
    ids=("windows", "sinks"),
)
def test_long_texts_attend_in_turn(monkeypatch, changes):
    """Logits and gradients are those of all queries at once; the last part is a short one."""
    config = tiny_config(48, **changes)
    params = numpy_spread_params(config, 0)
    tokens = np.random.default_rng(0).integers(0, 48, (2, 13))

    def loss_and_gradient(params):
        def loss(params):
            logits = transformer.apply(config, params, tokens).logits
            return jnp.sum(jax.nn.log_softmax(logits)[..., 3])

        return jax.value_and_grad(loss)(params)

    expected = jax.jit(loss_and_gradient)(params)
    attended, attend = set(), attention.attend

    def counted(query, segments, *rest):
        attended.add((query.shape[1], segments[0].keys.shape[2]))
        return attend(query, segments, *rest)

    for module in (attention, self_attention):
        monkeypatch.setattr(module, "QUERY_CHUNK", 5)
    monkeypatch.setattr(self_attention, "attend", counted)
    jax.clear_caches()  # the layer was traced above
    actual = jax.jit(lambda params: loss_and_gradient(params))(params)  # noqa: PLW0108 (traced anew)
    assert attended == {(5, 13)}
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_memory_of_a_gradient_grows_with_the_length_alone(monkeypatch):
    """Twice the tokens need about twice the memory; all queries at once would need four times."""
    config = tiny_config(48)
    params = numpy_spread_params(config, 0)
    for module in (attention, self_attention):
        monkeypatch.setattr(module, "QUERY_CHUNK", 16)

    def temporary(T):
        def loss(params, tokens):
            return jnp.sum(transformer.apply(config, params, tokens).logits)

        compiled = jax.jit(jax.grad(loss)).lower(params, np.zeros((1, T), np.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(512) < 2.2 * temporary(256)


def test_unknown_flag_or_family_is_refused_in_one_line(pair, tmp_path):
    with pytest.raises(
        InputError, match=r"^positions: expected rotary or relative or learned, found 'none'$"
    ):
        dataclasses.replace(CONFIGS[0], positions="none")
    with pytest.raises(InputError, match=r"^ffn: expected swiglu or geglu or gelu, found 'relu'$"):
        dataclasses.replace(CONFIGS[0], ffn="relu")
    with pytest.raises(InputError, match=r"^d_model: expected an even number, found 15$"):
        dataclasses.replace(CONFIGS[0], d_model=15)
    config = tiny_config(VOCAB, ffn="gelu")
    mixed = dataclasses.replace(pair[0], config=config)
    with pytest.raises(
        InputError, match=r"^model: expected the flags of one of gpt2, .*, found other flags$"
    ):
        loading.save(tmp_path / "mixed", mixed)
    assert not (tmp_path / "mixed").exists() or not list((tmp_path / "mixed").iterdir())
