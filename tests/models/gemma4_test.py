"""Gemma 4: odd shapes against `transformers`, keys of config.json, and what is refused.

`families_test` compares two golden folders: one with inputs per layer and shared keys, and one in
which keys are values.
"""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.bad_input import one_line
from helpers.golden_folders import GOLDEN, assert_same_model, copy_golden, golden_config

from spsjax import InputError, loading
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.models.hf import config_json
from spsjax.models.hf import weights as hf_weights
from spsjax.training import step as train_step

VOCAB = 40
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2, "head_dim": 6, "global_head_dim": 8, "sliding_window": 5,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
HALF = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.6,
        "rope_theta": 90.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
KINDS = {"s": "sliding_attention", "f": "full_attention"}
YARN, LONG = (
    {"full_attention": {"rope_type": kind, "factor": 0.5}, "sliding_attention": {}}
    for kind in ("yarn", "longrope")
)
ODD = {
    "sharing from a full layer alone": ("fsff", {"num_kv_shared_layers": 2}),
    "wide layers that share": ("sfsf", {"num_kv_shared_layers": 1, "use_double_wide_mlp": True}),
    "wide layers without sharing": ("sfsf", {"use_double_wide_mlp": True}),
    "inputs of one number": ("ssff", {"hidden_size_per_layer_input": 1}),
    "a wider table of inputs": (
        "sf",
        {"hidden_size_per_layer_input": 3, "vocab_size_per_layer_input": 99},
    ),
    "keys as values that are shared": (
        "sfsf",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "num_kv_shared_layers": 2}
        | {"hidden_size_per_layer_input": 4},
    ),
    "groups of full layers without keys as values": ("sf", {"num_global_key_value_heads": 1}),
    "another scaling": ("fsf", {"rope_parameters": ROPES, "final_logit_softcapping": 3.0}),
    "most of the dimensions rotated": ("sff", {"rope_parameters": HALF, "global_head_dim": 10}),
    "no layer with a window": ("fff", {"head_dim": 8, "num_kv_shared_layers": 1}),
    "mixture": (
        "sfsf",
        {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
        | {"moe_intermediate_size": 12, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "mixture with all experts": (
        "sf",
        {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 3}
        | {"moe_intermediate_size": 20, "hidden_size_per_layer_input": 4},
    ),
    "a head of its own": ("sf", {"tie_word_embeddings": False}),
    "layers that differ by number": (
        "ssf",
        {"per_layer_config": {key: {"head_dim": 4, "num_key_value_heads": 1} for key in "01"}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_shape_gives_the_logits_of_transformers(name, tmp_path):
    """A whole prompt, and single tokens with a cache; and transformers reads what is written."""
    torch = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[parity]'")
    transformers = pytest.importorskip("transformers", reason="needs the extra parity")
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("transformers is older than Gemma 4")
    kinds, changes = ODD[name]
    layers = {"num_hidden_layers": len(kinds), "layer_types": [KINDS[kind] for kind in kinds]}
    torch.manual_seed(0)
    theirs = transformers.Gemma4ForCausalLM(
        transformers.Gemma4TextConfig(**SMALL | layers | changes)
    ).eval()
    with torch.no_grad():
        for path, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if tensor.ndim == 1 and path.endswith(("weight", "scale", "layer_scalar")):
                tensor.add_(0.3 * torch.randn_like(tensor))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 17)).astype(np.int32)

    def logits_of(model):
        with torch.no_grad():
            return model(torch.from_numpy(tokens).long()).logits.numpy()

    theirs.save_pretrained(tmp_path / "theirs")
    model = loading.load(tmp_path / "theirs", dtype="float32")
    expected = logits_of(theirs)
    ours = train_step.forward(model.config, model.params, tokens).logits
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    cache = transformer.empty_cache(model.config, model.params, 2, 32)
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 17)):
        output = transformer.apply(model.config, model.params, tokens[:, start:stop], cache)
        np.testing.assert_allclose(output.logits, expected[:, start:stop], atol=1e-4)
        cache = cache.extend(output)
    if "per_layer_config" not in changes:
        hf_weights.save(tmp_path / "ours", model.config, model.params, "float32")
        back = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path / "ours").eval()
        np.testing.assert_allclose(logits_of(back), expected, atol=1e-4)


def test_nested_folder_is_the_model_of_its_text_config(tmp_path):
    """Tensors of images and sounds, and keys of layers that share others', are not read."""
    stray = {
        f"model.{name}.x.weight": np.zeros((2, 2), np.float32)
        for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    }
    stray["model.language_model.layers.3.self_attn.k_proj.weight"] = np.zeros((2, 2), np.float32)

    def nested(raw):
        text = {key: raw[key] for key in raw if key not in ("bos_token_id", "architectures")}
        return {"model_type": "gemma4", "text_config": text, "bos_token_id": raw["bos_token_id"]}

    def rename(key):
        return key.replace("model.", "model.language_model.", 1)

    folder = copy_golden("gemma4", tmp_path / "nested", rename, nested, **stray)
    assert_same_model(folder, "gemma4")


def test_keys_of_a_layer_are_those_of_released_files(tmp_path):
    """`global_head_dim` and its kin say the same as `per_layer_config` of newer files."""
    new = golden_config("gemma4_keys", tmp_path)
    old = golden_config(
        "gemma4_keys",
        tmp_path,
        per_layer_config=None,
        global_head_dim=8,
        num_global_key_value_heads=1,
    )
    assert new == old and old.layer(2).head_dim == 8 and old.layer(2).num_kv_heads == 1
    raw = config_json.to_json(new, "float32")
    assert (raw["global_head_dim"], raw["num_global_key_value_heads"]) == (8, 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"enable_moe_block": True, "num_experts": None}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input"),
        ({"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
        ({"rope_parameters": {KINDS["s"]: {}}}, f"rope_parameters.{KINDS['f']}"),
        ({"rope_parameters": {KINDS["f"]: {}}}, f"rope_parameters.{KINDS['s']}"),
        ({"rope_parameters": LONG}, f"rope_parameters.{KINDS['f']}.short_factor"),
        ({"rope_parameters": YARN}, f"rope_parameters.{KINDS['f']}.factor"),
    ],
)
def test_unsupported_key_is_refused_by_its_name(tmp_path, changes, named):
    with one_line(f"config.json: {named}: expected "):
        golden_config("gemma4", tmp_path, **changes)


def test_sharing_layers_have_no_keys_and_read_those_of_their_kind():
    config = config_json.read(GOLDEN / "gemma4")
    assert [config.source(layer) for layer in range(6)] == [0, 1, 2, 2, 1, 1]
    params = transformer.param_shapes(config)
    cache = jax.eval_shape(lambda: transformer.cache_of_layers(config, (), np.float32, 2, 16))
    for layer in (3, 4, 5):
        assert "key" not in params["layers"][layer]["attention"]
        assert cache.keys[layer] is None and cache.values[layer] is None
    # All heads have a number of their own.
    assert [keys.shape[-1] for keys in cache.keys[:3]] == [6, 8, 6]


def test_layer_whose_keys_are_read_cannot_be_skipped_alone():
    config = config_json.read(GOLDEN / "gemma4")
    Skipped((1, 4, 5), ()).check(config)
    with pytest.raises(InputError, match=r"expected layer 4, too, which reads the keys of layer 1"):
        Skipped((1,), ()).check(config)


def test_layer_that_shares_no_keys_is_refused():
    config = dataclasses.replace(config_json.read(GOLDEN / "gemma4"), changes=(), mixer="shared")
    with pytest.raises(InputError, match="layer 0 shares the keys of an earlier layer"):
        config.source(0)
