"""Rotary positions that are stretched: frequencies and factors are those of transformers 5.24.

The expected numbers were read from its `ROPE_INIT_FUNCTIONS`, for heads of 16, base 10,000 and an
original context of 64. `transformers_parity_test` compares whole models.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bad_input import one_line
from helpers.golden_folders import edit_config
from helpers.models import tiny_config
from helpers.numpy_models import numpy_spread_params

import spsjax
from spsjax import loading
from spsjax.models import rope
from spsjax.models.hf import config_json
from spsjax.models.hf import weights as hf_weights

ORIGINAL = "original_max_position_embeddings"
SHORT = [1.0, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0]
LONG = [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0]
PLAIN = [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278]
# Keys of config.json: scaling, context; expected: frequencies, factor, greatest length of a text.
CASES = {
    "yarn of Qwen": (
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0, "mscale_all_dim": 0, ORIGINAL: 64}, 64,
        [1.0, 0.2371708, 0.05, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.138629436111989, 256,
    ),
    "yarn of DeepSeek": (
        {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707, ORIGINAL: 64}, 2560,
        [1.0, 0.2134537, 0.035, 0.0007905695, 0.00025, 7.905695e-05, 2.5e-05, 7.905694e-06],
        1.0857263992561355, 2560,
    ),
    "yarn without rounding": (
        {"rope_type": "yarn", "factor": 32.0, "truncate": False, ORIGINAL: 64}, 2048,
        [1.0, 0.16427, 0.003893864, 0.0009882118, 0.0003125, 9.88212e-05, 3.125e-05, 9.88212e-06],
        1.3465735902799727, 2048,
    ),
    "yarn with its factor": (
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.8, ORIGINAL: 64}, 128,
        [1.0, 0.2635231, 0.06666666, 0.01581139, 0.005, 0.001581139, 0.0005, 0.0001581139],
        0.8, 128,
    ),
    "longrope": (
        {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, ORIGINAL: 64}, 256,
        [1.0, 0.3162278, 0.08, 0.02108185, 0.005, 0.001264911, 0.0003333333, 7.905695e-05],
        1.1547005383792517, 64,
    ),
    "longrope of one list": (
        {"type": "su", "short_factor": LONG, "long_factor": LONG, ORIGINAL: 64}, 256,
        [1.0, 0.2108185, 0.05, 0.007905695, 0.00125, 0.0001976424, 4.166667e-05, 9.882118e-06],
        1.1547005383792517, 256,
    ),
}  # fmt: skip
DYNAMIC = {"type": "dynamic", "factor": 2.0}
# Frequencies of `transformers` for texts of so many tokens.
OF_LENGTHS = {
    1: PLAIN,
    64: PLAIN,
    65: [1.0, 0.3148407, 0.0991247, 0.0312085, 0.0098257, 0.00309353, 0.000973969, 0.000306645],
    100: [1.0, 0.2839451, 0.0806248, 0.022893, 0.00650037, 0.00184575, 0.000524091, 0.000148813],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(48, head_dim=16, num_heads=2, num_kv_heads=1)
    hf_weights.save(folder, config, numpy_spread_params(config, 0), "float32")
    return folder


def config_of(folder, scaling, context, new_style):
    """Returns the config of a file that has a scaling in the older or the newer spelling."""
    kind = scaling.get("rope_type", scaling.get("type"))
    newer = scaling | {"rope_type": kind, "rope_theta": 10_000.0}
    keys = {"rope_parameters": newer, "rope_scaling": None} if new_style else {}
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    raw |= {"max_position_embeddings": context, "rope_scaling": scaling} | keys
    return config_json.parse(folder / "config.json", raw)


def turns(config, positions):
    """Returns the angles [T, C/2] of positions and the factor, from cosines and sines."""
    cos, sin = rope.angles(jnp.asarray([positions]), 16, config.rope_theta, config.rope_scaling)
    return np.arctan2(sin, cos)[0, :, 0], np.hypot(cos, sin)[0, :, 0]


@pytest.mark.parametrize("new_style", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(folder, name, new_style):
    scaling, context, expected, factor, longest = CASES[name]
    config = config_of(folder, scaling, context, new_style)
    assert config.max_positions == longest
    actual, factors = turns(config, [1, 3])
    np.testing.assert_allclose(actual[0], expected, rtol=2e-5)
    np.testing.assert_allclose(factors, factor, rtol=1e-6)
    raw = config_json.to_json(config, "float32")
    assert config_json.parse(folder / "config.json", raw) == config


@pytest.mark.parametrize("length", OF_LENGTHS)
def test_dynamic_scaling_raises_the_base_with_the_length_of_the_text(folder, length):
    """Each token has the frequencies of a text that ends with it, as when it is decoded."""
    config = config_of(folder, DYNAMIC, 64, False)
    assert config.max_positions == 128
    actual, _ = turns(config, [length - 1])
    expected = (length - 1) * np.asarray(OF_LENGTHS[length])
    np.testing.assert_allclose(np.cos(actual[0]), np.cos(expected), atol=3e-5)
    np.testing.assert_allclose(np.sin(actual[0]), np.sin(expected), atol=3e-5)
    raw = config_json.to_json(config, "float32")
    assert raw["max_position_embeddings"] == 64
    assert config_json.parse(folder / "config.json", raw) == config


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "ntk"}, "rope_type: expected one of \"default\", \"linear\""),
        ({"rope_type": "dynamic"}, "factor: expected a number >= 1, found none"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha: expected null"),
        ({"rope_type": "longrope", "short_factor": SHORT}, "long_factor: expected a list of p"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": LONG}, "expected 8 numbers"),
        ({"type": "yarn", "factor": 2.0, "beta_slow": 40}, "beta_slow: expected less than b"),
        *(
            ({"type": kind, "factor": factor}, f"rope_scaling.factor: expected {expected}")
            for kind in ("yarn", "dynamic")
            for factor, expected in (
                *((bad, "a number >= 1") for bad in (-4, 0, 0.5, float("nan"), "4", True)),
                *((huge, "less than 2**31 / 64") for huge in (1e9, 1e29)),
            )
        ),
        ({"type": "yarn", "factor": 2.0, ORIGINAL: 65}, f"{ORIGINAL}: expected at most max_pos"),
        ({"type": "yarn", ORIGINAL: 0}, f"{ORIGINAL}: expected an integer"),
        ({"type": "yarn", ORIGINAL: 32.0}, f"{ORIGINAL}: expected an integer"),
        ({"type": "yarn", "factor": 2.0, "rope_theta": 1}, "rope_theta: expected a number > 1"),
        ({"type": "longrope", "short_factor": SHORT, "long_factor": LONG, ORIGINAL: 1},
         f"{ORIGINAL}: expected at least 2"),
    ],
)  # fmt: skip
def test_scaling_that_is_not_supported_is_refused(folder, scaling, message):
    with one_line("config.json", message):
        config_of(folder, scaling, 64, False)


def test_text_beyond_the_context_is_refused_with_the_numbers(folder):
    """Of a stretched context, too; nothing runs on with positions that the model has not seen."""
    for scaling, longest in ((None, 64), ({"type": "yarn", "factor": 2.0}, 128)):
        edit_config(folder, rope_scaling=scaling, max_position_embeddings=64)
        model = loading.load(folder)
        with one_line("prompts[1], max_new_tokens: expected both within the context of "
                      f"{longest}", f"found {longest} + 1"):  # fmt: skip
            spsjax.generate(model, [[1], [2] * longest], max_new_tokens=1)
        with one_line("prompt, max_new_tokens: expected both within the context"):
            spsjax.Engine(model, rows=1, slots=256).submit([2] * longest, max_new_tokens=1)
