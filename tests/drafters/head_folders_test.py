"""Folders of drafters of the target's features: what is saved is loaded, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers import drafting
from helpers.bad_input import one_line
from helpers.golden_folders import rewrite
from helpers.models import build_model, spread_model

import spsjax
from spsjax import SamplingParams, Tree, drafters, loading
from spsjax.loading import names
from spsjax.training.tasks.features import build_drafter

PROMPTS = [[3, 4, 5, 3], [9], [1, 2, 1, 2, 1], [30, 31]]


@pytest.fixture(scope="module")
def target():
    return spread_model(48)


def loaded(name, target, **fields) -> loading.LoadedDrafter:
    """Returns a drafter with random weights, and without a training."""
    drafter = drafting.head(name, target.config, **fields)
    return loading.LoadedDrafter(name, drafter, drafting.random_weights(drafter))


def narrow_head(target) -> loading.LoadedDrafter:
    sizes = {"d_model": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 30}
    drafter = build_drafter({"method": "eagle3"} | sizes, target.config)
    return loading.LoadedDrafter("narrow", drafter, drafting.random_weights(drafter))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {}) for name in drafting.HEADS),
        ("narrow", {}),
        ("falcon", {"tokens_per_step": 3}),
        ("medusa", {"num_blocks": 2}),
        ("mlp_speculator", {"tied": False}),
    ],
)
def test_saved_drafter_is_loaded_unchanged(target, name, fields, tmp_path):
    """The same drafter and weights, so that it drafts the same tokens."""
    head = narrow_head(target) if name == "narrow" else loaded(name, target, **fields)
    spsjax.save_drafter(tmp_path / name, head, target, "float32")
    again = spsjax.load_drafter(tmp_path / name, target)
    assert again.drafter == head.drafter
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
    with pytest.raises(spsjax.InputError, match="expected a language model, found a drafter"):
        spsjax.load(tmp_path / name)


# Keys and tensors of published folders by which they are told apart. Weights may be missing.
BLOCK = {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"}
PAIR = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
FEW = {"draft_vocab_size": 32000}
PUBLISHED = [
    ("dflash", {"architectures": ["DFlashDraftModel"], "dflash_config": {}}, BLOCK),
    ("dflash", {"dflash_config": {"mask_token_id": 1}}, BLOCK),
    ("dflash2", {"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, BLOCK),
    ("dflash2", {"dflash_config": {"selector_rank": 256}} | FEW, ()),
    ("dspark", {"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, BLOCK),
    ("dspark", {"architectures": ["DSparkDraftModel"], "dflash_config": {}}, ()),
    *(
        (method, {"speculators_model_type": method} | FEW, tensors | {"d2t"})
        for method, tensors in (
            *(("dflash", BLOCK), ("dflash2", BLOCK), ("dspark", BLOCK)),
            ("eagle3", PAIR | {"layers.0.hidden_norm.weight"}),
        )
    ),
    ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"]} | FEW, PAIR | {"d2t"}),
    ("eagle3", {}, PAIR | {"layers.0.hidden_norm.weight"}),
    ("eagle", {"architectures": ["LlamaForCausalLM"]}, PAIR),
    ("mtp", {"speculators_model_type": "mtp"}, {"mtp_layers.0.input_proj.weight"}),
    (None, {"model_type": "qwen3_next"}, {"lm_head.weight", "mtp.fc.weight"}),
    ("medusa", {"medusa_num_heads": 4}, {"0.0.linear.weight"}),
    ("mlp_speculator", {"model_type": "mlp_speculator"}, {"speculator.emb.0.weight"}),
    ("gemma4_assistant", {"model_type": "gemma4_assistant", "text_config": {}}, ()),
    ("falcon", {"model_type": "falcon"}, {"layer.attention.query.weight"}),
    ("spire", {"model_type": "spire"}, {"norm.weight"}),
    ("blockwise", {"model_type": "blockwise"}, {"outs.0.kernel"}),
    (None, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {"lm_head.weight"}),
]


@pytest.mark.parametrize(("method", "raw", "tensors"), PUBLISHED)
def test_folder_has_the_layout_of_one_drafter(tmp_path, method, raw, tensors):
    """An error names both if a folder has the layouts of two."""
    (tmp_path / "config.json").write_text(json.dumps(raw), "utf-8")
    if tensors:
        arrays = dict.fromkeys(tensors, np.zeros(1, np.float32))
        safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    module = names.method_of(tmp_path)
    assert module is (getattr(drafters, method) if method else None)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"medusa_num_heads": 4, "dflash_config": {}},
            "expected keys of one drafter, found those of ['dflash', 'medusa']",
        ),
        (
            {"speculators_model_type": "peagle"},
            "speculators_model_type: expected one of dflash, dflash2, dspark, eagle3, mtp, found",
        ),
    ],
)
def test_folder_of_no_single_drafter_is_refused(tmp_path, raw, message):
    (tmp_path / "config.json").write_text(json.dumps(raw), "utf-8")
    with one_line(message):
        names.method_of(tmp_path)


def test_drafters_that_do_not_fit_are_refused_in_one_line(target, tmp_path):
    folder = tmp_path / "eagle3"
    spsjax.save_drafter(folder, loaded("eagle3", target), target)
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    layer = raw["transformer_layer_config"]
    ids = tensors["d2t"]
    cases = (
        ({"speculators_model_type": "peagle"}, {}, "speculators_model_type: expected"),
        ({"norm_before_fc": True}, {}, "norm_before_fc: expected false"),
        ({"target_hidden_size": 64}, {}, "d_model=32"),
        ({"transformer_layer_config": layer | {"hidden_size": 64}}, {}, "another width (64)"),
        ({"transformer_layer_config": layer | {"vocab_size": 50}}, {}, "vocab_size=48"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, {}, "expected numbers of layers in [0, "),
        ({}, {"d2t": None}, "expected a tensor d2t"),
        ({}, {"d2t": ids + 30}, "d2t: expected offsets of different ids"),
        ({}, {"d2t": ids[:-1]}, "d2t: expected shape"),
        ({}, {"d2t": ids + 0.5}, "d2t: expected integers"),
        ({}, {"fc.weight": tensors["fc.weight"][:, 1:]}, "fc.weight: expected shape"),
        ({}, {"norm.weight": None}, "expected a tensor norm.weight, found none"),
        ({}, {"layers.1.mlp.up_proj.weight": ids}, "expected no tensor layers.1"),
    )
    for fields, changed, message in cases:
        (folder / "config.json").write_text(json.dumps(raw), "utf-8")
        rewrite(folder, fields, tensors | changed)
        with one_line(message):
            spsjax.load_drafter(folder, target)


@pytest.mark.parametrize(
    ("name", "fields", "tensors", "message"),
    [
        ("medusa", {"hidden_size": 64}, {}, "target with hidden_size 32, found 64"),
        ("medusa", {"vocab_size": 50}, {}, "target with vocab_size 48, found 50"),
        ("medusa", {}, {"2.0.linear.bias": None}, "expected a tensor 2.0.linear.bias, found none"),
        ("medusa", {"medusa_num_layers": 2}, {}, "expected a tensor"),
        ("mlp_speculator", {"emb_dim": 8}, {}, "target with emb_dim 32, found 8"),
        ("mlp_speculator", {"n_predict": "3"}, {}, "n_predict: expected an integer"),
        ("mlp_speculator", {"tie_weights": False}, {}, "expected a tensor speculator.emb.1.weight"),
        ("mlp_speculator", {"inner_dim": 25}, {}, "expected shape"),
        ("blockwise", {"num_heads": 5}, {}, "expected a tensor outs.4"),
    ],
)
def test_folders_that_do_not_fit_are_refused(target, tmp_path, name, fields, tensors, message):
    spsjax.save_drafter(tmp_path, loaded(name, target), target)
    rewrite(tmp_path, fields, tensors)
    with one_line(message):
        spsjax.load_drafter(tmp_path, target)


def test_medusa_of_the_first_trainer_uses_the_targets_head(target, tmp_path):
    """Its files have no vocabulary matrices, and their config may name fewer heads."""
    spsjax.save_drafter(tmp_path, loaded("medusa", target), target, "float32")
    none = {f"{index}.1.weight": None for index in range(4)}
    rewrite(tmp_path, {"medusa_num_heads": 2}, none)
    again = spsjax.load_drafter(tmp_path, target)
    assert (again.drafter.own_heads, again.drafter.num_heads) == (False, 4)


def test_tied_mlp_speculator_may_be_stored_with_copies(target, tmp_path):
    """The published files repeat what all steps share."""
    head = loaded("mlp_speculator", target)
    spsjax.save_drafter(tmp_path, head, target, "float32")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    copies = {
        f"speculator.{name}.{i}.weight": stored[f"speculator.{name}.0.weight"]
        for name in ("emb", "head", "ln")
        for i in (1, 2, 3)
    }
    copies |= {f"speculator.ln.{i}.bias": stored["speculator.ln.0.bias"] for i in (1, 2, 3)}
    copies |= {f"speculator.proj.{i}.weight": stored["speculator.proj.1.weight"] for i in (2, 3)}
    rewrite(tmp_path, {}, copies)
    again = spsjax.load_drafter(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


def test_drafter_without_features_cannot_be_saved(target, tmp_path):
    with pytest.raises(spsjax.InputError, match="expected a loaded drafter of the target's"):
        spsjax.save_drafter(tmp_path, spsjax.load_drafter("ngram", target), target)
    head = loaded("eagle", target)
    for odd, of, message in (
        (head.drafter, target, "drafter: expected a loaded drafter"),
        (head, "target", "target: expected a loaded model, found str"),
        (dataclasses.replace(head, params={}), target, "expected the weights of its shape"),
    ):
        with pytest.raises(spsjax.InputError, match=message):
            spsjax.save_drafter(tmp_path, odd, of)
    assert not list(tmp_path.iterdir())


def test_drafter_of_another_target_is_refused(target):
    other = loading.random(dataclasses.replace(target.config, d_ff=16), dtype="float32")
    with pytest.raises(spsjax.InputError, match="eagle: expected a drafter of this target's"):
        spsjax.generate(other, PROMPTS, loaded("eagle", target), 2, max_new_tokens=4)


MESHES = ("eagle3", None), ("eagle3", False), ("eagle", False)


@pytest.mark.parametrize(("name", "replicate"), MESHES)
def test_head_on_a_mesh_is_whole_or_split(target, tmp_path, name, replicate):
    """Its weights are whole on every device, or split like the target's."""
    mesh = spsjax.sharding.mesh(2, 4)
    many = build_model(target.config, target.params, mesh)
    spsjax.save_drafter(tmp_path, loaded(name, target), target, "float32")
    head = spsjax.load_drafter(tmp_path, many, replicate)
    for kernel in ("fc", "query", "out"):
        actual = head.params["fc"] if kernel == "fc" else head.params["layer"]["attention"][kernel]
        assert actual["kernel"].is_fully_replicated == (replicate is None)


@pytest.mark.slow
def test_split_head_on_a_mesh_gives_the_tokens_of_one_device(target, tmp_path):
    """Whole ones are in `contract_test`."""
    many = build_model(target.config, target.params, spsjax.sharding.mesh(2, 4))
    one = loading.LoadedDrafter("eagle3", *drafting.random_head("eagle3", target.config))
    spsjax.save_drafter(tmp_path, one, target, "float32")
    texts = [
        spsjax.generate(
            model,
            PROMPTS,
            spsjax.load_drafter(tmp_path, model, flag, Tree.branching(2, 2)),
            None,
            SamplingParams(0.9),
            12,
            stop_at_eos=False,
        )
        for model, flag in ((many, False), (target, None))
    ]
    assert np.array_equal(texts[0].tokens, texts[1].tokens)
    assert texts[0].stats.accepted_histogram == texts[1].stats.accepted_histogram
    assert sum(texts[0].stats.accepted_histogram[1:]) > 0


def test_head_that_the_mesh_does_not_divide_is_refused_if_it_is_to_be_split(target):
    mesh = spsjax.sharding.mesh(1, 3)
    with pytest.raises(spsjax.InputError, match=r"^d_model: expected a multiple .*3, found 32"):
        drafting.head("eagle", target.config).shardings(mesh, False)
