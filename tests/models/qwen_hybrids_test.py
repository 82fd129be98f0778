"""Layouts of Qwen3-Next and Qwen3.5 that the golden folders lack, and configs that are refused."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers.environment import ROOT

from spsjax import InputError, loading
from spsjax.models.hf import config_json
from spsjax.models.hf.locations import TensorLocation

GOLDEN = ROOT / "tests" / "golden"


def raw_of(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


def test_multimodal_folder_with_joined_experts_gives_the_same_weights(tmp_path):
    """Released folders of mixtures have one tensor for all experts, and a head that drafts."""
    expected = loading.load(GOLDEN / "qwen3_5_moe", dtype="float32")
    stored = safetensors.numpy.load_file(GOLDEN / "qwen3_5_moe" / "model.safetensors")
    tensors = {"mtp.norm.weight": np.zeros(2), "model.visual.norm.bias": np.zeros(2)}
    experts: dict[str, list] = {}
    for name, tensor in stored.items():
        layer, inside, rest = name.partition("mlp.experts.")
        if inside:
            number, kind, _ = rest.split(".")
            experts.setdefault(f"{layer}{inside}{kind}", []).append((int(number), tensor))
        else:
            tensors[_nested(name)] = tensor
    joined = {
        name: np.stack([tensor for _, tensor in sorted(some, key=lambda one: one[0])])
        for name, some in experts.items()
    }
    for name, down in joined.items():
        if name.endswith("down_proj"):
            layer = name.removesuffix("down_proj")
            both = joined[f"{layer}gate_proj"], joined[f"{layer}up_proj"]
            tensors[_nested(f"{layer}gate_up_proj")] = np.concatenate(both, axis=1)
            tensors[_nested(name)] = down
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    raw = {"model_type": "qwen3_5_moe", "text_config": raw_of("qwen3_5_moe"), "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = loading.load(tmp_path, dtype="float32")
    assert model.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, model.params, expected.params)


def _nested(name):
    return (
        name if name.startswith("lm_head") else name.replace("model.", "model.language_model.", 1)
    )


def test_slices_of_a_part_are_those_of_the_whole():
    """A mesh may cut a parameter within the groups of a tensor that it shares."""
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(12, 5))  # three groups of a row of the first and three of the second
    rows = np.arange(12).reshape(3, 4)
    for part, columns in ((0, rows[:, :1]), (1, rows[:, 1:])):
        location = TensorLocation(("x",), False, True, part, 2, (1, 3))
        width = columns.size
        assert location.stored_shape((5, width)) == whole.shape
        for start, stop in ((0, width), (1, width), (1, 2), (2, 2)):
            index = slice(1, 4), slice(start, stop)
            read = location.read(whole, index, width)
            np.testing.assert_array_equal(read, whole[columns.ravel()].T[index])
    parts = {0: whole[rows[:, :1].ravel()].T, 1: whole[rows[:, 1:].ravel()].T}
    np.testing.assert_array_equal(location.joined(parts), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, r"layer_types: expected 4 of .* at least once"),
        ({"layer_types": ["full_attention"] * 3}, r"layer_types: expected 4 of "),
        ({"layer_types": ["full_attention", "sliding"] * 2}, r"layer_types: expected 4 of "),
        ({"layer_types": [["full_attention"]] * 4}, r"layer_types: expected 4 of "),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads: expected a multiple of .*=2"),
        ({"linear_conv_kernel_dim": 0}, r"linear_conv_kernel_dim: expected an integer in \[1,"),
        ({"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": 0.1}},
         r"partial_rotary_factor: expected an even part of head_dim=8"),
        ({"attn_output_gate": False}, r"attn_output_gate: expected true, found False"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers: expected \[\], found \[0\]"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step: expected 1, found 2"),
        ({"full_attention_interval": 9, "layer_types": None},
         r"full_attention_interval: expected at most 4 layers, found 9"),
    ],
)  # fmt: skip
def test_config_of_another_model_is_refused_by_its_key(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(raw_of("qwen3_next") | changes))
    with pytest.raises(InputError, match=rf"config\.json: {message}"):
        config_json.read(tmp_path)


def test_every_fourth_layer_has_attention_without_layer_types(tmp_path):
    raw = raw_of("qwen3_next")
    del raw["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 8}))
    config = config_json.read(tmp_path)
    kinds = [config.layer(layer).mixer for layer in range(8)]
    assert kinds == (["delta"] * 3 + ["attention"]) * 2 and len(config.changes) == 4
