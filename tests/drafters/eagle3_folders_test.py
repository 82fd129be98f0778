"""Folders of EAGLE-3 as other trainers write them: the same drafter, or one line that says why not.

What is expected is the drafter that was saved. Its folder is rewritten in each of the layouts.
"""

import dataclasses
import json
import warnings

import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers import drafting
from helpers.golden_folders import rewrite
from helpers.models import spread_model

import spsjax
from spsjax import InputError, loading
from spsjax.drafters import eagle3
from spsjax.models import transformer

TAPS = "eagle_aux_hidden_state_layer_ids"
LAYERS = 6


@pytest.fixture(scope="module")
def target():
    return spread_model(48, num_layers=LAYERS)


@pytest.fixture(scope="module")
def head(target) -> loading.LoadedDrafter:
    """A drafter of 30 tokens that reads the inputs of layers 2, 4 and 6."""
    layer = dataclasses.replace(target.config, num_layers=1)
    drafter = eagle3.Drafter(layer, target.config, vocab_size=30, tap_layers=(2, 4, 6))
    params = drafting.random_weights(drafter)
    return loading.LoadedDrafter("head", drafter, params)


@pytest.fixture
def folder(head, target, tmp_path):
    """The drafter's folder in SafeAILab's layout, without the layers that it reads."""
    spsjax.save_drafter(tmp_path, head, target, "float32")
    raw = json.loads((tmp_path / "config.json").read_text("utf-8"))
    flat = raw["transformer_layer_config"] | {"draft_vocab_size": raw["draft_vocab_size"]}
    (tmp_path / "config.json").write_text(json.dumps(flat), "utf-8")
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    renamed = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
    safetensors.numpy.save_file(renamed, path)
    return tmp_path


def load(folder, target, *messages):
    """Returns the drafter of a folder, of which exactly these warnings are given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = spsjax.load_drafter(folder, target)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == len(messages), texts
    assert all(part in text and "\n" not in text for part, text in zip(messages, texts)), texts
    return loaded


@pytest.mark.parametrize(
    "fields",
    [
        {TAPS: [2, 4, 6]},
        {
            "eagle_config": {
                TAPS: [2, 4, 6],
                "use_aux_hidden_state": True,
                "use_mtp_layernorm": None,
            }
        },
        {"transformer_layer_config": {TAPS: [2, 4, 6]}},
        {"transformer_layer_config": {"eagle_config": {TAPS: [2, 4, 6]}}, TAPS: None},
        {"eagle_config": {"aux_hidden_state_layer_ids": [2, 4, 6], "fc_input_size": 96}},
        {"target_layer_ids": [2, 4, 6]},
    ],
)
def test_layers_to_read_are_read_from_every_layout(target, head, folder, fields):
    rewrite(folder, fields)
    assert load(folder, target).drafter == head.drafter


def test_layers_that_begin_with_one_are_those_whose_outputs_are_read(target, head, folder):
    """SpecForge and ModelOpt count outputs from 0. Only the layout of speculators says inputs."""
    rewrite(folder, {"eagle_config": {TAPS: [1, 3, 5]}})
    message = f"eagle_config.{TAPS} [1, 3, 5] begins with 1"
    assert load(folder, target, message).drafter == head.drafter
    inputs = dataclasses.replace(head.drafter, tap_layers=(1, 3, 5))
    spsjax.save_drafter(folder, dataclasses.replace(head, drafter=inputs), target)
    assert load(folder, target).drafter == inputs


@pytest.mark.parametrize("fields", [{}, {TAPS: None}, {"eagle_config": {TAPS: None}}])
def test_layers_that_no_file_names_are_the_authors_and_a_line_says_so(target, folder, fields):
    rewrite(folder, fields)
    message = f"no {TAPS}, so the drafter reads the inputs of layers [2, 3, 3]"
    assert load(folder, target, message).drafter.tap_layers == (2, 3, 3)


@pytest.mark.parametrize("section", [None, "eagle_config", "transformer_layer_config"])
@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_flags_are_read_from_every_layout(target, head, folder, section, flag):
    fields = {flag: True} if section is None else {section: {flag: True}}
    rewrite(folder, {TAPS: [2, 4, 6]} | fields)
    assert load(folder, target).drafter == dataclasses.replace(head.drafter, **{flag: True})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"eagle_config": {"use_mtp_layernorm": True}},
            "eagle_config.use_mtp_layernorm: expected f",
        ),
        (
            {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
            "first_layer: expected t",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: expected true"),
        ({"eagle_config": {"fusion": "sum"}}, "eagle_config.fusion: expected no such key, but one"),
        ({"transformer_layer_config": {"norm_before_fc": True}}, "norm_before_fc: expected false"),
        ({TAPS: [2, 4, 6], "eagle_config": {TAPS: [2, 3, 6]}}, "expected [2, 4, 6], as eagle_aux"),
        ({TAPS: [2, 4]}, "expected 3 layers, which fc.weight reads, found [2, 4]"),
        ({TAPS: "2,4,6"}, "expected a list, found '2,4,6'"),
        ({"eagle_config": [], "architectures": 3}, "eagle_config: expected an object, found []"),
        ({TAPS: [1, 3, 5.5]}, "expected numbers of layers in [0, 5], found [1, 3, 5.5]"),
        ({TAPS: [2, 4, 7]}, "layer_ids: expected numbers of layers in [0, 6], found [2, 4, 7]"),
        ({TAPS: [1, 3, 6]}, "layer_ids: expected numbers of layers in [0, 5], found [1, 3, 6]"),
        ({TAPS: [-2, 4, 6]}, "layer_ids: expected numbers of layers in [0, 6], found [-2, 4, 6]"),
        ({TAPS: [2, 4, 6], "draft_vocab_size": 29}, "draft_vocab_size: expected 30, the rows of"),
        (
            {"hidden_size": 64, "target_hidden_size": 32},
            "heads of another width (64) than the targ",
        ),
    ],
)
def test_keys_that_ask_for_another_computation_are_refused(target, folder, fields, message):
    rewrite(folder, fields)
    with pytest.raises(InputError) as caught:
        spsjax.load_drafter(folder, target)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_method_follows_from_the_layer_without_a_key(target, head, folder):
    rewrite(folder, {TAPS: [2, 4, 6], "draft_vocab_size": None, "architectures": None})
    again = load(folder, target)
    assert again.drafter == head.drafter
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


@pytest.mark.parametrize("size", [None, 48])
def test_head_that_is_left_out_is_the_targets(target, folder, size):
    """Its logits are those of a copy of the target's head."""
    tensors = {"d2t": None, "t2d": None, "lm_head.weight": None}
    rewrite(folder, {TAPS: [2, 4, 6], "draft_vocab_size": size}, tensors)
    shared = load(folder, target)
    assert not shared.drafter.own_head and "head" not in shared.params
    kernel = np.asarray(transformer.head_kernel(target.config, target.params))
    rewrite(folder, {}, {"lm_head.weight": np.ascontiguousarray(kernel.T)})
    copied = load(folder, target)
    assert copied.drafter.own_head and copied.drafter.vocab_size == 48
    outputs = np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)
    actual, expected = (
        jax.jit(one.drafter.choices)(one.with_target(target.params), outputs).whole()
        for one in (shared, copied)
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert actual.shape == (2, 3, 48)
    spsjax.save_drafter(folder / "again", shared, target, "float32")
    again = load(folder / "again", target)
    assert again.drafter == shared.drafter
    jax.tree.map(np.testing.assert_array_equal, again.params, shared.params)


def test_head_with_rows_for_the_targets_padding_loses_them(folder):
    padded = spread_model(40, num_layers=LAYERS, padded_vocab_size=48)
    rows = np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32)
    rewrite(
        folder, {TAPS: [2, 4, 6], "draft_vocab_size": 48}, {"d2t": None, "lm_head.weight": rows}
    )
    loaded = load(folder, padded)
    assert loaded.drafter.vocab_size == 40
    np.testing.assert_array_equal(loaded.params["head"]["kernel"], rows[:40].T)


def test_ids_in_any_order_give_the_same_drafter(target, head, folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    order = np.random.default_rng(0).permutation(30)
    ids = tensors["d2t"] + np.arange(30)
    changed = {
        "d2t": ids[order] - np.arange(30),
        "lm_head.weight": tensors["lm_head.weight"][order],
    }
    rewrite(folder, {TAPS: [2, 4, 6]}, changed)
    jax.tree.map(np.testing.assert_array_equal, load(folder, target).params, head.params)


@pytest.mark.parametrize(
    ("offsets", "actual"), [({0: 1}, "some of them twice"), ({29: 30}, "ids from 0 to 59")]
)
def test_ids_that_name_no_tokens_are_refused(target, folder, offsets, actual):
    d2t = np.zeros(30, np.int64)
    for row, offset in offsets.items():
        d2t[row] = offset
    rewrite(folder, {TAPS: [2, 4, 6]}, {"d2t": d2t})
    with pytest.raises(InputError, match=f"d2t: expected offsets of different ids.*{actual}"):
        spsjax.load_drafter(folder, target)


def test_embedding_of_its_own_is_said_not_to_be_used(target, folder):
    own = np.asarray(target.params["embed"]["embedding"])
    rewrite(folder, {TAPS: [2, 4, 6]}, {"embed_tokens.weight": own.astype(np.float16)})
    load(folder, target)
    rewrite(folder, {}, {"embed_tokens.weight": own[::-1].copy()})
    load(folder, target, "embed_tokens differs from the target's and is not used")
