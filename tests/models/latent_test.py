"""Tests of latent attention and of DeepSeek's mixtures: NumPy's logits, caches, trees, folders."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers import drafting, latent_reference
from helpers.bad_input import one_line
from helpers.golden_folders import edit_config, equal
from helpers.models import build_model, tiny_config
from helpers.numpy_models import numpy_nearby_model, numpy_spread_params

import spsjax
from spsjax import SamplingParams, loading
from spsjax.drafters import ngram
from spsjax.drafters.shapes import Tree
from spsjax.models import quantization, transformer
from spsjax.models.hf import config_json
from spsjax.models.hf import weights as hf_weights

LATENT = {
    "mixer": "latent", "num_kv_heads": 1, "head_dim": 10, "rotary_dim": 4, "latent_rank": 6,
    "value_dim": 3, "rope_interleaved": True, "rope_theta": 50.0,
}  # fmt: skip
EXPERTS = {
    "router": "sigmoid", "num_experts": 8, "experts_per_token": 3, "d_ff": 8, "shared_d_ff": 16,
    "expert_scale": 2.5,
}  # fmt: skip
DENSE = ("d_ff", 24), ("num_experts", 0)
MODELS = {
    # As DeepSeek-V3: the first layer is dense, and tokens choose from two groups of four.
    "groups": LATENT
    | EXPERTS
    | {"num_layers": 2, "changes": (DENSE, ()), "query_rank": 12, "biases": "attention"}
    | {"expert_groups": 4, "groups_per_token": 2, "query_scale": 0.5},
    # As its smaller versions: queries from the stream, and weights that are no shares.
    "plain": LATENT | EXPERTS | {"rope_interleaved": False, "renormalize": False, "shared_d_ff": 0},
    "small": LATENT | {"head_dim": 9},  # odd, with an even part that is rotated
}
FOLDERS = "groups", "plain"
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 14)).astype(np.int32)


@functools.cache
def model_of(name) -> loading.Model:
    """Returns a model whose biases and norms are not those of a fresh one."""
    config, rng = tiny_config(48, **MODELS[name]), np.random.default_rng(1)
    params = numpy_spread_params(config, 0)

    def moved(leaf):
        return leaf if leaf.ndim > 1 else leaf + rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype)

    return build_model(config, jax.tree.map(moved, params), None)


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens):
    return transformer.apply(config, params, tokens).logits


@functools.partial(jax.jit, static_argnums=0)
def fed(config, params, cache, tokens):
    output = transformer.apply(config, params, tokens, cache)
    return output.logits, cache.extend(output)


@functools.partial(jax.jit, static_argnums=0)
def grown(config, params, cache, block, tokens, positions, ancestors):
    more = {"block": block, "positions_BT": positions, "ancestors": ancestors}
    return transformer.apply(config, params, tokens, cache, **more)


def expected_of(model, tokens=TOKENS):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.params)
    return np.stack([latent_reference.logits(model.config, params, row) for row in tokens])


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_the_papers_without_and_with_a_cache(name):
    """A text at once, with keys per head, and in pieces, against compressed keys."""
    model = model_of(name)
    expected = expected_of(model)
    whole = forward(model.config, model.params, TOKENS)
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    cache = transformer.empty_cache(model.config, model.params, 2, 16)
    width = model.config.latent_rank + model.config.rotary_dim
    assert {keys.shape for keys in cache.keys} == {(2, 1, 16, width)}
    assert sum(values.size for values in cache.values) == 0
    for start, stop in ((0, 6), (6, 12), (12, 13), (13, 14)):
        logits, cache = fed(model.config, model.params, cache, TOKENS[:, start:stop])
        np.testing.assert_allclose(logits, expected[:, start:stop], atol=1e-4)


def test_a_path_of_a_tree_is_read_and_kept_as_a_text():
    """Of nodes that came in two passes. After one path is kept, the next token continues it."""
    model = model_of("small")
    text, tree = TOKENS[:1, :6], np.array([[7, 20, 3, 31, 9]], np.int32)
    parents, kept = [-1, 0, 0, 2, 1], [0, 2, 3]
    paths = []
    for node in range(5):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    ancestors = np.array([[node in path for node in range(5)] for path in paths])[None]
    positions = 5 + np.array([[len(path) for path in paths]])
    cache = transformer.empty_cache(model.config, model.params, 1, 16)
    _, cache = fed(model.config, model.params, cache, text)
    logits, block = [], transformer.empty_block(model.config, model.params, 1, 5)
    for own in (slice(0, 2), slice(2, 5)):
        nodes = positions[:, own], ancestors[:, own]
        output = grown(model.config, model.params, cache, block, tree[:, own], *nodes)
        block = output.block
        logits.append(output.logits[0])
    logits = np.concatenate(logits)
    for node, path in enumerate(paths):
        expected = expected_of(model, np.concatenate([text, tree[:, path]], axis=1))[0, -1]
        np.testing.assert_allclose(logits[node], expected, atol=1e-4)
    length = np.array([6 + len(kept)], np.int32)
    cache = cache.write(block, np.array([[*kept, -1, -1]]), length, output.hidden)
    after, _ = fed(model.config, model.params, cache, np.array([[11]], np.int32))
    expected = expected_of(model, np.concatenate([text, tree[:, kept], [[11]]], axis=1))
    np.testing.assert_allclose(after[0, 0], expected[0, -1], atol=1e-4)


GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2]]


def texts(target, drafter, **options):
    options |= {"sampling": GREEDY, "max_new_tokens": 16}
    with drafting.small_programs():
        out = spsjax.generate(target, PROMPTS, drafter, **options)
    return [row.tolist() for row in out.tokens], out.stats


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_speculation_gives_the_greedy_texts(kind):
    """With chains of n-grams, and trees of a nearby model, which are partly accepted."""
    target = model_of("groups")
    drafter, count = ngram.Drafter(), 3
    if kind == "tree":
        drafter, count = numpy_nearby_model(target, distance=0.1), Tree.branching(2, 2)
        drafter, count = loading.as_drafter(target, drafter, count), None
    plain, _ = texts(target, None)
    drafted, stats = texts(target, drafter, num_speculative_tokens=count)
    assert drafted == plain
    assert sum(stats.accepted_histogram[1:]) > 0


def test_a_token_that_is_not_finite_spoils_no_earlier_one():
    """It has weight 0 for them, with keys per head and with compressed ones."""
    model = model_of("small")
    params = dict(model.params)
    table = np.array(params["embed"]["embedding"])
    table[TOKENS[0, 5]] = np.nan
    params["embed"] = {"embedding": table}
    clean = np.flatnonzero(~np.isin(TOKENS[0], TOKENS[0, 5]))
    clean = clean[clean < 5]
    expected = forward(model.config, model.params, TOKENS[:1])[0, clean]
    whole = np.asarray(forward(model.config, params, TOKENS[:1]))[0]
    cache = transformer.empty_cache(model.config, params, 1, 16)
    pieces, _ = fed(model.config, params, cache, TOKENS[:1])
    assert np.isnan(whole[5:]).all() and np.isnan(pieces[0, 5:]).all()
    np.testing.assert_allclose(whole[clean], expected, atol=1e-5)
    np.testing.assert_allclose(pieces[0, clean], expected, atol=1e-4)


def test_a_model_in_int8_is_that_of_its_rounded_matrices():
    """Those of heads, too, in both places where they are applied."""
    model = model_of("small")
    rounded = loading.quantized(model, "int8").params
    own = rounded["layers"][0]["attention"]
    assert all(map(quantization.is_matrix, (own["key_up"]["kernel"], own["value_up"]["kernel"])))
    values = jax.tree.map(
        lambda leaf: leaf.values() if quantization.is_matrix(leaf) else leaf,
        rounded,
        is_leaf=quantization.is_matrix,
    )
    whole, expected = (forward(model.config, params, TOKENS) for params in (rounded, values))
    np.testing.assert_allclose(whole, expected, atol=1e-3)
    cache = transformer.empty_cache(model.config, model.params, 2, 16)
    _, cache = fed(model.config, rounded, cache, TOKENS[:, :13])
    logits, _ = fed(model.config, rounded, cache, TOKENS[:, 13:])
    np.testing.assert_allclose(logits[:, 0], expected[:, 13], atol=1e-3)


# Folders. They have no key for a scale without YaRN.


def in_folder(name) -> loading.Model:
    model = model_of(name)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, query_scale=0.0))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_saved_model_is_read_back_with_the_layers_of_a_drafter_beside_it(name, tmp_path):
    """Which are ignored, if their tensors say that they are a drafter's."""
    model, folder = in_folder(name), tmp_path
    hf_weights.save(folder, model.config, model.params, "float32")
    last = model.config.num_layers
    file = folder / "model.safetensors"
    stored = safetensors.numpy.load_file(file)
    further = {f"model.layers.{last}.mlp.gate.weight": np.zeros((2, 2), np.float32)}
    safetensors.numpy.save_file(stored | further, file)
    with one_line(f"expected no tensor model.layers.{last}.mlp.gate.weight"):
        loading.load(folder, dtype="float32")
    further[f"model.layers.{last}.eh_proj.weight"] = np.zeros((2, 4), np.float32)
    safetensors.numpy.save_file(stored | further, file)
    again = loading.load(folder, dtype="float32")
    assert again.config == model.config and equal(again.params, model.params)


def test_the_bias_of_the_choice_stays_in_float32(tmp_path):
    """Also in a model of bfloat16, where rounding it would change the choice of experts."""
    model = in_folder("groups")
    hf_weights.save(tmp_path, model.config, model.params, "bfloat16")
    again = loading.load(tmp_path, dtype="bfloat16").params["layers"][1]["ffn"]
    assert again["router"]["kernel"].dtype == "bfloat16"
    bias = model.params["layers"][1]["ffn"]["choice_bias"]
    np.testing.assert_array_equal(again["choice_bias"], bias)


YARN = {
    "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 16,
}  # fmt: skip


def test_yarn_also_scales_the_scores_and_is_written_back(tmp_path):
    config_json.write(tmp_path, in_folder("groups").config, "float32")
    edit_config(tmp_path, rope_scaling=YARN)
    scaled = config_json.read(tmp_path)
    factor = 0.1 * 0.707 * np.log(40) + 1
    np.testing.assert_allclose(scaled.query_scale, 10**-0.5 * factor**2)
    config_json.write(tmp_path, scaled, "float32")
    assert config_json.read(tmp_path) == scaled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, 'scoring_func: expected "sigmoid"'),
        ({"topk_method": "greedy"}, 'topk_method: expected "noaux_tc"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: expected 8"),
        ({"n_group": 3}, "n_group: expected a divisor"),
        ({"topk_group": 1}, "topk_group: expected"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: expected at most 1024"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mscale_all_dim": 1}}, "rope_scaling"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: expected none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_decoder_lacks_is_refused_by_its_key(tmp_path, changes, message):
    config_json.write(tmp_path, in_folder("groups").config, "float32")
    edit_config(tmp_path, **changes)
    with one_line(message):
        config_json.read(tmp_path)
