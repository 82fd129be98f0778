"""The head for multi-token prediction: what it computes, and the layouts that it is read from."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import drafting, mtp_reference
from helpers.bad_input import one_line
from helpers.calls import padded
from helpers.golden_folders import copy_golden, equal, rewrite
from helpers.numpy_models import numpy_spread_model
from helpers.packages import package

import spsjax
from spsjax import decode, loading
from spsjax.drafters import mtp
from spsjax.models import transformer
from spsjax.models.hf import stitching
from spsjax.verifiers import rejection

VOCAB, K = 48, 3
PROMPTS = [[3, 4, 5, 3, 9, 1, 2], [9, 8], [1, 2, 1, 2, 1]]
# Targets of published kinds, as far as a head depends on them.
KINDS = {
    "qwen3": {"qk_norm": True},
    "zero-centred norms": {"qk_norm": True, "norm_offset": 1.0, "head_dim": 6},
    "qwen3_moe": {"qk_norm": True, "num_experts": 8, "experts_per_token": 2, "renormalize": True},
}
MODULES = {
    "fc": "mtp.fc",
    "embed_norm": "mtp.pre_fc_norm_embedding",
    "feature_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer.attention_norm": "mtp.layers.0.input_layernorm",
    "layer.ffn_norm": "mtp.layers.0.post_attention_layernorm",
    "layer.attention.query": "mtp.layers.0.self_attn.q_proj",
    "layer.attention.key": "mtp.layers.0.self_attn.k_proj",
    "layer.attention.value": "mtp.layers.0.self_attn.v_proj",
    "layer.attention.out": "mtp.layers.0.self_attn.o_proj",
    "layer.attention.query_norm": "mtp.layers.0.self_attn.q_norm",
    "layer.attention.key_norm": "mtp.layers.0.self_attn.k_norm",
    "layer.ffn.gate": "mtp.layers.0.mlp.gate_proj",
    "layer.ffn.up": "mtp.layers.0.mlp.up_proj",
    "layer.ffn.down": "mtp.layers.0.mlp.down_proj",
    "layer.ffn.router": "mtp.layers.0.mlp.gate",
}


@functools.cache
def target_of(kind) -> loading.Model:
    return numpy_spread_model(VOCAB, num_layers=2, **KINDS[kind])


@functools.cache
def head_of(kind) -> loading.LoadedDrafter:
    drafter = mtp.Drafter.from_config({"num_speculative_tokens": K}, target_of(kind).config)
    return loading.LoadedDrafter("mtp", drafter, drafting.random_weights(drafter))


def stored_head(head: loading.LoadedDrafter) -> dict[str, np.ndarray]:
    """Returns the tensors of a head by their published names."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(head.params):
        *module, kind = (entry.key for entry in path)
        if kind.startswith("experts_"):
            name = f"mtp.layers.0.mlp.experts.{{}}.{kind.removeprefix('experts_')}_proj.weight"
            tensors |= {name.format(i): np.array(expert.T) for i, expert in enumerate(leaf)}
        else:
            tensors[f"{MODULES['.'.join(module)]}.weight"] = np.array(leaf.T)
    return tensors


def write_target(folder, kind, tensors, shards=1):
    """Writes a target with further tensors, in one file or in several."""
    loading.save(folder, target_of(kind), "float32")
    path = folder / "model.safetensors"
    stored = safetensors.numpy.load_file(path) | tensors
    if shards == 1:
        safetensors.numpy.save_file(stored, path)
        return folder
    path.unlink()
    weight_map = {}
    for index in range(shards):
        file = f"model-{index}.safetensors"
        own = {name: stored[name] for name in sorted(stored)[index::shards]}
        safetensors.numpy.save_file(own, folder / file)
        weight_map |= dict.fromkeys(own, file)
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_draft_has_the_distributions_of_the_report(kind):
    """In the loop, after prompts, at every depth: embedding first, the normed output fed back."""
    target, head = target_of(kind), head_of(kind)
    program = decode.Program(target.config, head.drafter, rejection.Verifier())
    tokens, lengths = padded(PROMPTS, 16)
    proposal = drafting.proposed_after(
        program, head.with_target(target.params), tokens, lengths, 32
    )
    hidden = transformer.apply(target.config, target.params, jnp.asarray(tokens)).hidden
    weights, table, kernel = jax.tree.map(
        np.asarray,
        (head.params, target.params["embed"]["embedding"], target.params["head"]["kernel"]),
    )
    for row, text in enumerate(PROMPTS):
        states = np.asarray(hidden[row, : len(text) - 1])
        drafted = np.asarray(proposal.tokens[row]).tolist()
        about = head.drafter.config, weights, table, kernel, text, states, drafted
        lines = mtp_reference.logits(*about)
        expected = np.exp(lines - lines.max(-1, keepdims=True))
        expected /= expected.sum(-1, keepdims=True)
        np.testing.assert_allclose(proposal.probs[row], expected, atol=2e-5)
        assert np.ptp(lines, axis=-1).min() > 1


def assert_greedy_text_of(target, head):
    """Asserts that drafts change no greedy text."""
    with drafting.small_programs():
        greedy = spsjax.SamplingParams(0.0)
        texts = [
            spsjax.generate(target, PROMPTS, drafter, K * bool(drafter), greedy, 12).tokens
            for drafter in (head, None)
        ]
    assert all(map(np.array_equal, *texts))


@functools.partial(jax.jit, static_argnums=0)
def trained(drafter, params, tokens, last):
    """Returns the logits [K, V] of each step of the draft that begins at an index of a text."""
    hidden = transformer.apply(drafter.target, params["target"], tokens[:, :-1]).hidden
    hidden = jnp.where(jnp.arange(hidden.shape[1])[:, None] <= last, hidden, 0)  # no later ones
    steps = drafter.unrolled(params, tokens[:, 1:], hidden, K, later=last[None])
    rows = [outputs[:, 0 if step else last] for step, outputs in enumerate(steps)]
    return drafter.choices(params, jnp.stack(rows, axis=1)).whole()[0]


# Golden folders of families whose targets ship with heads, and a tensor of each layout.
FAMILIES = {
    "qwen3_next": "mtp.layers.0.self_attn.q_proj.weight",
    "qwen3_5": "mtp.layers.0.mlp.down_proj.weight",
    "qwen3_5_moe": "mtp.layers.0.mlp.shared_expert_gate.weight",
    "glm4_moe": "model.layers.3.mlp.gate.e_score_correction_bias",
    "deepseek_v3": "model.layers.3.self_attn.kv_b_proj.weight",
    "glm4_moe_lite": "model.layers.3.shared_head.norm.weight",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_every_family_drafts_exactly(tmp_path, family):
    """Beside its target, from its distributions in training, and no other greedy text."""
    folder = copy_golden(family, tmp_path / "model")
    target = spsjax.load(folder, dtype="float32")
    drafter = mtp.Drafter.from_config({"num_speculative_tokens": K}, target.config)
    assert drafter.config.mixer != "delta" and not drafter.config.changes
    params = drafting.random_weights(drafter)
    spsjax.save_drafter(folder, loading.LoadedDrafter("", drafter, params), target, "float32")
    assert FAMILIES[family] in safetensors.numpy.load_file(folder / "model.safetensors")
    head = spsjax.load_drafter("mtp", spsjax.load(folder, dtype="float32"))
    assert equal(head.params, params) and head.drafter.config == drafter.config
    assert_greedy_text_of(target, head)
    program = decode.Program(target.config, drafter, rejection.Verifier())
    both, (tokens, lengths) = head.with_target(target.params), padded(PROMPTS, 16)
    proposal = drafting.proposed_after(program, both, tokens, lengths, 32)
    for row, text in enumerate(PROMPTS):
        whole = np.zeros((1, 16), np.int32)
        whole[0, : len(text) + K] = [*text, *np.asarray(proposal.tokens[row])]
        lines = trained(drafter, both, whole, np.int32(len(text) - 2))
        np.testing.assert_allclose(proposal.probs[row], jax.nn.softmax(lines), atol=2e-5)


@pytest.mark.slow  # where the package is installed
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_head_behind_the_last_layer_has_the_logits_of_transformers(tmp_path, family):
    """Which reads the folder that was written here."""
    layers = package("transformers", "transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("needs a transformers with MtpModel")
    import torch
    import transformers

    folder = copy_golden(family, tmp_path / "model")
    rewrite(folder, {"num_nextn_predict_layers": 1})
    target = spsjax.load(folder, dtype="float32")
    drafter = mtp.Drafter.from_config({"num_speculative_tokens": K}, target.config)
    params = drafting.random_weights(drafter)
    head = loading.LoadedDrafter("", drafter, params)
    spsjax.save_drafter(folder, head, target, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]  # the published has 61
    model = layers.MtpModel.from_pretrained(theirs).eval().float()
    tokens = np.random.default_rng(0).integers(3, 40, (1, 14)).astype(np.int32)
    both = head.with_target(target.params)
    hidden = transformer.apply(target.config, target.params, jnp.asarray(tokens)).hidden[:, :-1]
    (outputs,) = drafter.unrolled(both, jnp.asarray(tokens[:, 1:]), hidden, 1)
    ours = np.asarray(drafter.draft_logits(both, outputs))[0]
    for count in (1, 6, 13):
        cache = transformers.cache_utils.MtpCache(config=theirs.config.get_mtp_config())
        with torch.no_grad():
            _, logits, _ = model(
                input_ids=torch.from_numpy(tokens[:, 1 : count + 1]).long(),
                last_hidden_states=torch.from_numpy(np.array(hidden[:, :count])),
                attention_mask=None,
                position_ids=torch.arange(1, count + 1)[None],
                mtp_cache=cache,
            )
        np.testing.assert_allclose(ours[count - 1], logits[0, 0].numpy(), atol=1e-4)
    assert np.ptp(ours) > 1


@pytest.mark.slow  # where the package is installed
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_head_of_a_hybrid_has_the_logits_of_speculators(tmp_path, family):
    """The first step, from a folder that was written here; its experts are in one tensor."""
    package("speculators", "speculators.models.mtp")
    import torch
    from speculators.models.mtp import MTPDraftModel

    target = spsjax.load(copy_golden(family, tmp_path / "model"), dtype="float32")
    drafter = mtp.Drafter.from_config({"num_speculative_tokens": K}, target.config)
    head = loading.LoadedDrafter("", drafter, drafting.random_weights(drafter))
    spsjax.save_drafter(tmp_path / "head", head, target, "float32")
    model = MTPDraftModel.from_pretrained(tmp_path / "head").eval().float()
    tokens = np.random.default_rng(0).integers(3, 40, (1, 14)).astype(np.int32)
    hidden = transformer.apply(target.config, target.params, jnp.asarray(tokens)).hidden
    with torch.no_grad():
        text = torch.from_numpy(tokens).long(), torch.from_numpy(np.array(hidden))
        (theirs, *_), *_ = model(*text)
    both = head.with_target(target.params)
    (outputs,) = drafter.unrolled(both, jnp.asarray(tokens[:, 1:]), hidden[:, :-1], 1)
    ours = np.asarray(drafter.draft_logits(both, outputs))[:, : theirs.shape[1]]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
    assert np.ptp(ours) > 1
    assert equal(spsjax.load_drafter(tmp_path / "head", target).params, head.params)


@pytest.mark.parametrize(("kind", "shards"), [("qwen3", 1), ("qwen3_moe", 3)])
def test_head_of_the_targets_folder_is_loaded(tmp_path, kind, shards):
    """By the name of the method, beside its target, of which the folder is a model."""
    folder = write_target(tmp_path, kind, stored_head(head_of(kind)), shards)
    target = spsjax.load(folder, dtype="float32")
    assert equal(target.params, target_of(kind).params)
    head = spsjax.load_drafter("mtp", target)
    assert equal(head.params, head_of(kind).params)
    assert head.drafter.config == head_of(kind).drafter.config
    assert equal(spsjax.load_drafter(f"mtp:{folder}", target).params, head.params)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("has_head", [True, False])
def test_trained_head_is_stitched_into_the_targets_folder(tmp_path, shards, has_head):
    """Other tensors stay, hard links to the old files, too, and no old tensor is left."""
    old = stored_head(head_of("qwen3_moe")) if has_head else {}
    folder = write_target(tmp_path / "old", "qwen3_moe", old, shards)
    (tmp_path / "new").mkdir()
    for file in folder.iterdir():
        (tmp_path / "new" / file.name).hardlink_to(file)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    target = spsjax.load(folder, dtype="float32")
    trained = jax.tree.map(lambda leaf: leaf + 1, head_of("qwen3_moe").params)
    head = loading.LoadedDrafter("", head_of("qwen3_moe").drafter, trained)
    for _ in range(2):  # once more, over what was written
        spsjax.save_drafter(tmp_path / "new", head, target, "float32")
    new = spsjax.load(tmp_path / "new", dtype="float32")
    assert equal(new.params, target.params)
    assert equal(spsjax.load_drafter("mtp", new).params, trained)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    names = [name for file in files for name in safetensors.numpy.load_file(file)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("shards", [1, 3])
def test_folder_is_whole_if_stitching_fails(tmp_path, monkeypatch, shards):
    """At every file that is written."""
    folder = write_target(tmp_path, "qwen3", stored_head(head_of("qwen3")), shards)
    target, write, left = spsjax.load(folder, dtype="float32"), stitching.atomic_files.write, []
    save = safetensors.numpy.save_file

    def failing(function):
        def call(*arguments, **options):
            if left.pop():
                raise OSError(28, "No space left on device")
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(safetensors.numpy, "save_file", failing(save))
    monkeypatch.setattr(stitching.atomic_files, "write", failing(write))
    trained = jax.tree.map(lambda leaf: leaf + 1, head_of("qwen3").params)
    head = loading.LoadedDrafter("", head_of("qwen3").drafter, trained)
    for count in range(1 if shards == 1 else shards + 2):
        left[:] = [True] + [False] * count
        with one_line("expected a place to write to, found "):
            spsjax.save_drafter(folder, head, target, "float32")
        assert equal(spsjax.load(folder, dtype="float32").params, target.params)
        assert equal(spsjax.load_drafter("mtp", target).params, head_of("qwen3").params)
        assert not list(folder.glob(".*.partial"))


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({}, {"mtp.fc.weight": None}, "expected a tensor mtp.fc.weight, found none"),
        ({}, {"mtp.norm.weight": None}, "expected a tensor mtp.norm.weight, found none"),
        ({}, {"mtp.norm.bias": np.zeros(32)}, "expected no tensor mtp.norm.bias"),
        ({}, {"mtp.fc.weight": np.zeros((32, 32), np.float32)}, "mtp.fc.weight: expected shape"),
        ({"hidden_size": 64}, {}, "hidden_size: expected 32, the target's, found 64"),
        ({"num_attention_heads": 4}, {}, "num_attention_heads: expected 8, the target's, found 4"),
    ],
)
def test_folder_without_a_fitting_head_is_refused(tmp_path, fields, tensors, message):
    folder = write_target(tmp_path, "qwen3", stored_head(head_of("qwen3")))
    rewrite(folder, fields, tensors)
    with one_line(message):
        spsjax.load_drafter(f"mtp:{folder}", target_of("qwen3"))


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_partly_missing_head_behind_the_last_layer_is_refused(tmp_path, family):
    """As one under names of its own is; the target does not need it."""
    folder = copy_golden(family, tmp_path / "model")
    config = loading.load_config(folder)
    drafter = mtp.Drafter.from_config({}, config)
    stored = {f"model.layers.3.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")}
    params = drafting.random_weights(drafter)
    rewrite(folder, {}, mtp.LAYOUT.located(drafter, params, "float32", stored))
    for name in sorted(stored):
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        rewrite(folder, {}, {name: None})
        target = spsjax.load(folder, dtype="float32")
        with one_line(f"expected a tensor {name}, found none"):
            spsjax.load_drafter("mtp", target)
        rewrite(folder, {}, {name: tensors[name]})


def test_target_without_a_folder_has_no_head(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for name, message in (
        ("mtp", "'tiny': expected a model folder"),
        (f"mtp:{file}", "expected a folder that holds a head, found a file"),
        ("MTP", "name: expected 'mtp' or a model, found 'MTP'"),
    ):
        with one_line(message):
            spsjax.load_drafter(name, target_of("qwen3"))


def test_copies_that_differ_and_further_heads_are_named(tmp_path):
    """Neither is used. Copies that do not differ say nothing."""
    target, tensors = target_of("qwen3"), stored_head(head_of("qwen3"))
    folder = write_target(tmp_path, "qwen3", tensors)
    head = np.array(target.params["head"]["kernel"].T)
    other = {"mtp.layers.1.mlp.up_proj.weight": head}
    spsjax.save_drafter(tmp_path / "speculators", head_of("qwen3"), target, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewrite(tmp_path / "speculators", {}, {"lm_head.weight": head})
        spsjax.load_drafter(tmp_path / "speculators", target)
    rewrite(tmp_path / "speculators", {}, {"lm_head.weight": -head})
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the target's"):
        spsjax.load_drafter(tmp_path / "speculators", target)
    rewrite(folder, {}, other)
    with pytest.warns(UserWarning, match="several heads .*: the first one drafts all tokens"):
        spsjax.load_drafter(f"mtp:{folder}", target)
