"""Block drafters: their layers and distributions by hand, and what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import block_reference, drafting, reference
from helpers.bad_input import one_line
from helpers.calls import padded
from helpers.golden_folders import rewrite
from helpers.models import spread_model

import spsjax
from spsjax import Tree, decode
from spsjax.drafters import block_layers
from spsjax.loading import LoadedDrafter
from spsjax.models import transformer
from spsjax.training.tasks.features import build_drafter
from spsjax.verifiers import match

K, VOCAB, SLOTS = 4, 48, 32
IDS = np.sort(np.random.default_rng(4).permutation(VOCAB)[:30]).astype(np.int32)
PROMPTS = [[3, 4, 5, 3, 4, 5, 3, 9, 1, 2], [9], [1, 2, 1, 2, 1, 2], [30, 31, 5]]
MARGINALS = Tree(tuple(range(K)))  # a chain, drawn from the marginals that a chain is chosen by
# Options of published drafters. One of two layers has a window, except in "causal".
OPTIONS = {
    "two sides": {"causal": "none", "windows": (4, 0)},
    "windows": {"causal": "windows", "anchor_drafts": True, "embed_scale": 2.5, "softcap": 3.0},
    "causal": {"causal": "all", "output_scale": 0.4},
}


def cases(*slow, gate):
    """Returns a case for the gate, and others for the full suite."""
    return gate, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)


@pytest.fixture(scope="module")
def target():
    """A target with padding behind its vocabulary, where the mask token is.

    Its own factor of embeddings is not the drafter's.
    """
    return spread_model(VOCAB, padded_vocab_size=56, logit_softcap=5.0, embed_scale=True)


def drafter_of(target, name="dflash", num_layers=2, windows=(), **fields):
    """Returns a drafter, and random weights; the ids of a draft vocabulary have gaps."""
    fields = {"block_size": 6, "mask_token_id": 50, "num_speculative_tokens": K} | fields
    drafter = drafting.head(name, target.config, **fields)
    windows = windows or ((4, 0) if drafter.causal == "windows" else ())
    config = dataclasses.replace(drafter.config, num_layers=num_layers, windows=windows)
    drafter = dataclasses.replace(drafter, config=config)
    weights = drafting.random_weights(drafter)
    return drafter, weights | ({"ids": jnp.asarray(IDS)} if drafter.own_head else {})


def proposed(target, drafter, weights, tree=None):
    """Returns what is proposed after the prompts, in NumPy; chains have estimates."""
    drafter = dataclasses.replace(drafter, tree=tree)
    rule = decode.confidence.Surviving(0.5)
    program = decode.Program(target.config, drafter, match.Verifier(), schedule=rule)
    params = {"target": target.params, "drafter": weights}
    inputs = jax.device_put(padded(PROMPTS, SLOTS, seed=0))
    return jax.tree.map(np.asarray, drafting.proposed_after(program, params, *inputs, SLOTS))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _taps(config, layers, params, tokens):
    return transformer.apply(config, params, tokens, tap_layers=layers).taps


def by_hand(target, drafter, weights, text, **options):
    """Returns the outputs of the slots behind a text, and their logits, in NumPy."""
    tokens = np.zeros((1, 12), np.int32)
    tokens[0, : len(text)] = text
    taps = _taps(target.config, drafter.tap_layers, target.params, tokens)
    taps = np.concatenate(taps, axis=-1)[0, : len(text) - 1].astype(float)
    embedding = np.asarray(target.params["embed"]["embedding"], float)
    arguments = jax.tree.map(np.asarray, weights), embedding, taps, text[-1]
    outputs = block_reference.outputs(drafter, *arguments, **options)
    own = weights["head"] if drafter.own_head else target.params["head"]
    head = np.asarray(own["kernel"])[:, :VOCAB]
    return outputs, block_reference.logits(drafter, head, outputs)


def among(drafter, lines_KR):
    """Returns logits [K, V] of the target's vocabulary; -inf: it is not the draft's."""
    if not drafter.own_head:
        return lines_KR
    lines_KV = np.full((len(lines_KR), VOCAB), -np.inf)
    lines_KV[:, IDS] = lines_KR
    return lines_KV


@pytest.mark.parametrize("options", cases("two sides", "causal", gate="windows"))
def test_dflash_slots_have_the_marginals_of_the_paper(target, options):
    drafter, weights = drafter_of(target, **OPTIONS[options])
    drawn = proposed(target, drafter, weights, MARGINALS)
    for row, text in enumerate(PROMPTS):
        _, logits = by_hand(target, drafter, weights, text)
        expected = [reference.to_probs(line) for line in logits]
        np.testing.assert_allclose(drawn.probs[row, :K], expected, atol=2e-5)


def test_dflash_chain_begins_with_a_draw_from_a_whole_block(target):
    """Later tokens are the most probable ones of their slots, as point masses.

    The block is whole for a shorter chain: slots attend to all others.
    """
    drafter, weights = drafter_of(target, num_speculative_tokens=2)
    chain = proposed(target, drafter, weights)
    assert chain.parents is None
    for row, text in enumerate(PROMPTS):
        _, logits = by_hand(target, drafter, weights, text)
        expected = [reference.to_probs(logits[0]), np.eye(VOCAB)[np.argmax(logits[1])]]
        np.testing.assert_allclose(chain.probs[row], expected, atol=2e-5)
        assert chain.tokens[row, 1] == np.argmax(logits[1])
        expected = [reference.to_probs(line).max() for line in logits]
        np.testing.assert_allclose(chain.confidence[row], expected[:2], atol=2e-5)


def check_conditionals(target, drafter, weights, logits_of, estimated=None, **options):
    """Asserts that each token's distribution is the one by hand, after the tokens before it.

    `estimated` is a function of the outputs of the slots and of the tokens before them. It returns
    the estimates of acceptance; None: they are the greatest probabilities.
    """
    proposal = proposed(target, drafter, weights)
    for row, text in enumerate(PROMPTS):
        outputs, lines = by_hand(target, drafter, weights, text, **options)
        outputs = outputs[1 - drafter.anchor_drafts :][:K]
        before = np.asarray([text[-1], *proposal.tokens[row, :-1]])
        chances = [] if estimated is None else estimated(outputs, before)
        drafted = logits_of(lines[:K], outputs, before)
        for slot, line in enumerate(among(drafter, drafted)):
            expected = reference.to_probs(line)
            np.testing.assert_allclose(proposal.probs[row, slot], expected, atol=3e-5)
            chance = expected.max() if estimated is None else chances[slot]
            np.testing.assert_allclose(proposal.confidence[row, slot], chance, atol=3e-5)
    return proposal


@pytest.mark.parametrize("taps", cases(3, gate=2))
def test_dflash2_draws_among_the_candidates_of_each_slot(target, taps):
    """Convolutions over slots, and a selector that reads the token before; others are not drawn."""
    options = {"conv_kernel_size": taps, "output_scale": 0.4, "num_layers": 1}
    drafter, weights = drafter_of(target, "dflash2", **options)
    selector = jax.tree.map(np.asarray, weights["candidate_selector"])
    logits_of = functools.partial(block_reference.selected, drafter, selector)
    arguments = target, drafter, weights, logits_of
    proposal = check_conditionals(*arguments, around=block_reference.convolved)
    assert (proposal.probs > 0).sum(axis=-1).max() == 8


@pytest.mark.parametrize("kind", cases("vanilla", "gated", gate="rnn"))
def test_dspark_reads_the_tokens_before_a_slot(target, kind):
    """The Markov head does, and the confidence head, before whose doubts a chain may end.

    The draft vocabulary lacks tokens, which get probability 0.
    """
    options = {"markov_kind": kind, "anchor_drafts": True, "num_layers": 1, "vocab_size": 30}
    drafter, weights = drafter_of(target, "dspark", **options)
    own = jax.tree.map(np.asarray, weights)
    logits_of = functools.partial(block_reference.markov, own["markov_head"])

    def estimated(outputs, before):
        return block_reference.confidence(own, outputs, before)

    check_conditionals(target, drafter, weights, logits_of, estimated)


def test_number_of_tokens_of_a_block_is_checked(target):
    for anchor_drafts in (False, True):
        most = 6 - (not anchor_drafts)
        options = {"anchor_drafts": anchor_drafts, "num_speculative_tokens": None}
        assert drafter_of(target, **options)[0].num_speculative_tokens == most
        with one_line(f"at most one for each of {most} drafting slots, found {most + 1}"):
            drafter_of(target, **options | {"num_speculative_tokens": most + 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask_token_id": 56},
            "mask_token_id: expected a row of the target's embedding, below 56",
        ),
        ({"causal": "some"}, "causal: expected one of none, windows, all, found 'some'"),
        ({"tap_layers": (0, 2)}, "tap_layers: expected layers in [0, 1], found (0, 2)"),
        ({"embed_scale": 0.0}, "embed_scale: expected"),
        ({"name": "dflash2", "conv_group_size": 5}, "conv_group_size: expected a divisor of"),
        ({"name": "dspark", "markov_kind": "lstm"}, "markov_kind: expected vanilla or gated or"),
        (
            {"name": "dspark", "markov_kind": "rnn", "anchor_drafts": False},
            "markov_kind: expected vanilla or gated if the anchor does not draft, found rnn",
        ),
        ({"block_size": 10**9}, "block_size: expected at most the target's"),
        ({"vocab_size": 49}, "vocab_size: expected at most the target's 48, found 49"),
        ({"name": "dflash2", "vocab_size": 30}, "vocab_size: expected the target's 48, as cand"),
    ],
)
def test_odd_block_drafters_are_refused(target, options, message):
    with one_line(message):
        drafter_of(target, **options)


def test_config_of_a_block_drafter_has_defaults_of_the_target(target):
    """The mask token is the last row of the embedding, and the layers are evenly spaced."""
    drafter = build_drafter({"method": "dflash", "num_layers": 2, "block_size": 4}, target.config)
    assert (drafter.mask_token_id, drafter.tap_layers) == (55, (1, 1))
    assert drafter.config.qk_norm and drafter.num_speculative_tokens == 3
    assert block_layers.default_tap_layers(36, 5) == (2, 10, 18, 26, 34)
    assert block_layers.default_tap_layers(36, 1) == (19,)


def test_rule_that_ends_chains_is_refused_for_point_masses(target):
    loaded = LoadedDrafter("dflash", *drafter_of(target))
    rule = spsjax.drafters.stopping.Entropy()
    loaded = spsjax.loading.drafters.with_stop_rule(loaded, target, rule)
    with one_line("stop_rule: expected a drafter that samples chains"):
        spsjax.generate(target, PROMPTS, loaded, K, max_new_tokens=4)


def test_folder_of_speculators_is_read_like_the_authors(target, tmp_path):
    """It counts inputs of layers, not outputs, and stores copies of the target's tensors."""
    drafter, weights = drafter_of(target, **OPTIONS["windows"])
    spsjax.save_drafter(tmp_path, LoadedDrafter("", drafter, weights), target, "float32")
    raw = json.loads((tmp_path / "config.json").read_text("utf-8"))
    section = raw.pop("dflash_config")
    assert section["target_layer_ids"] == [
        -1,
        0,
    ]  # the embedding is read, too
    layer = {name: value for name, value in raw.items() if "architectures" not in name}
    nested = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [0, 1],
        "sliding_window_non_causal": False,
        "draft_vocab_size": 56,
        "transformer_layer_config": layer,
        **section,
    }
    (tmp_path / "config.json").write_text(json.dumps(nested), "utf-8")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    table = np.asarray(target.params["embed"]["embedding"])
    copies = {"embed_tokens.weight": table, "lm_head.weight": np.zeros((56, 32), np.float32)}
    safetensors.numpy.save_file(tensors | copies, tmp_path / "model.safetensors")
    again = spsjax.load_drafter(tmp_path, target)
    drafted = dataclasses.replace(drafter, num_speculative_tokens=None)
    assert again.drafter == dataclasses.replace(drafted, num_speculative_tokens=6)
    jax.tree.map(np.testing.assert_array_equal, again.params, weights)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_draft_vocabulary_is_stored_like_that_of_speculators(target, tmp_path, name):
    """With a head and tables. The rows may be in any order, and belong to their tokens."""
    drafter, weights = drafter_of(target, name, vocab_size=30, num_layers=1, softcap=3.0)
    spsjax.save_drafter(tmp_path, LoadedDrafter("", drafter, weights), target, "float32")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(stored["d2t"] + np.arange(30), IDS)
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), IDS)
    assert stored["t2d"].shape == (56,) and stored["lm_head.weight"].shape == (30, 32)
    order = np.random.default_rng(0).permutation(30)
    changed = {"d2t": IDS[order] - np.arange(30)}
    for key in {"lm_head.weight", "markov_head.markov_w2.weight"} & stored.keys():
        changed[key] = stored[key][order]
    rewrite(tmp_path, {}, changed)
    again = spsjax.load_drafter(tmp_path, target)
    assert again.drafter == dataclasses.replace(drafter, num_speculative_tokens=drafter.max_steps)
    jax.tree.map(np.testing.assert_array_equal, again.params, weights)
    rewrite(tmp_path, {}, {"lm_head.weight": None})
    with one_line("expected a tensor lm_head.weight beside d2t, found none"):
        spsjax.load_drafter(tmp_path, target)
    rewrite(tmp_path, {}, {"lm_head.weight": stored["lm_head.weight"], "t2d": ~stored["t2d"]})
    with one_line("t2d: expected the 30 tokens of d2t to be marked, found 26 marked tokens"):
        spsjax.load_drafter(tmp_path, target)
    rewrite(tmp_path, {}, {"t2d": stored["t2d"], "embed_tokens.weight": np.zeros((0, 32), "f4")})
    with pytest.warns(UserWarning, match="embed_tokens differs"):
        spsjax.load_drafter(tmp_path, target)


def test_training_begins_with_the_targets_head_of_the_draft_vocabulary(target):
    drafter, weights = drafter_of(target, vocab_size=30)
    params = {"target": target.params, "drafter": weights}
    begun = drafter.from_target(weights, params)["head"]["kernel"]
    np.testing.assert_array_equal(begun, np.asarray(target.params["head"]["kernel"])[:, IDS])


def test_dspark_folder_may_have_no_confidence_head(target, tmp_path):
    """Its tensors decide. An unknown kind of Markov head is refused."""
    drafter, weights = drafter_of(target, "dspark", markov_kind="gated", has_confidence=False)
    spsjax.save_drafter(tmp_path, LoadedDrafter("", drafter, weights), target, "float32")
    again = spsjax.load_drafter(tmp_path, target).drafter
    assert (again.has_confidence, again.markov_kind) == (False, "gated")
    rewrite(tmp_path, {"enable_confidence_head": True}, {})
    with one_line("expected a tensor confidence_head.proj.weight, as enable_confidence_head"):
        spsjax.load_drafter(tmp_path, target)
    rewrite(tmp_path, {"enable_confidence_head": False, "markov_head_type": "lstm"}, {})
    with one_line("markov_head_type: expected one of vanilla, gated, rnn, found 'lstm'"):
        spsjax.load_drafter(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 2}, "num_target_layers: expected the target's 1, found 2"),
        ({"hidden_size": 64}, "d_model=32, found 64"),
        ({"block_size": 7}, "block_size: expected 6, as dflash_config.block_size, found 7"),
        ({"model_type": "gemma2"}, 'model_type: expected "qwen3"'),
        ({"draft_vocab_size": 30}, "expected a tensor d2t, the draft's vocabulary, found none"),
        ({"dflash_config": {"mask_token_id": 50}}, "target_layer_ids: expected a list, found none"),
        (
            {"dflash_config": {"mask_token_id": 50, "target_layer_ids": [1]}},
            "target_layer_ids: expected numbers of layers in [-1, 0], found [1]",
        ),
        ({"dflash_config": {"target_layer_ids": [0, 0]}}, "mask_token_id: expected an integer"),
        ({"num_hidden_layers": 3}, "expected a tensor layers.2."),
        ({"num_hidden_layers": 10**6}, "expected tensors of 1000000 layers (config.json), found"),
    ],
)
def test_folders_of_other_targets_are_refused(target, tmp_path, changes, message):
    loaded = LoadedDrafter("", *drafter_of(target))
    spsjax.save_drafter(tmp_path, loaded, target, "float32")
    rewrite(tmp_path, changes, {})
    with one_line(message):
        spsjax.load_drafter(tmp_path, target)


def test_windows_of_published_folders_are_read(target, tmp_path):
    """`layer_types` name them. Their slots are causal, unless a flag says otherwise."""
    spsjax.save_drafter(tmp_path, LoadedDrafter("", *drafter_of(target)), target, "float32")
    kinds = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    for flags, causal in (
        ({"is_causal": None}, "windows"),
        ({"is_causal": False}, "none"),
        ({"is_causal": True}, "all"),
    ):
        rewrite(tmp_path, kinds | {"use_sliding_window": None} | flags, {})
        drafter = spsjax.load_drafter(tmp_path, target).drafter
        assert (drafter.config.windows, drafter.causal) == ((9, 0), causal)


LAYER = """input_layernorm.weight post_attention_layernorm.weight mlp.down_proj.weight
mlp.gate_proj.weight mlp.up_proj.weight self_attn.k_norm.weight self_attn.k_proj.weight
self_attn.o_proj.weight self_attn.q_norm.weight self_attn.q_proj.weight self_attn.v_proj.weight"""
# Names and shapes [out, in] of published tensors: D = 32, R = 6, 56 tokens.
MORE = {
    "dflash": {},
    "dflash2": {
        "layers.1.attention_conv.base_kernel": (2, 2, 32),
        "layers.0.mlp_conv.kernel_projection.weight": (32, 32),
        "candidate_selector.predecessor_codebook": (56, 6),
        "candidate_selector.successor_codebook": (56, 6),
        "candidate_selector.hidden_projection.weight": (6, 32),
    },
    "dspark": {
        "markov_head.markov_w1.weight": (56, 6),
        "markov_head.markov_w2.weight": (56, 6),
        "confidence_head.proj.weight": (1, 38),
        "confidence_head.proj.bias": (1,),
    },
}


@pytest.mark.parametrize("name", MORE)
def test_tensors_have_the_names_of_published_folders(target, tmp_path, name):
    spsjax.save_drafter(tmp_path, LoadedDrafter("", *drafter_of(target, name)), target)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    assert MORE[name].items() <= shapes.items()
    assert shapes["fc.weight"] == (32, 64)
    layers = {f"layers.{index}.{key}" for index in (0, 1) for key in LAYER.split()}
    expected = layers | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert expected == {*shapes} - {key for key in shapes if key in MORE[name] or "_conv." in key}
