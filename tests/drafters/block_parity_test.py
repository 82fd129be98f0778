"""Block drafters compared with `speculators` 0.9, where it is installed, on random weights.

Its models are saved by its own code, and read by `load_drafter`. Its windows are wider than the
text here, because in training it counts them from the anchor. Serving counts them from each slot,
as z-lab does, and so does spsjax (`blocks_test`).
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import spread_model
from helpers.packages import package

import spsjax
from spsjax import loading

pytestmark = pytest.mark.slow  # where the package is installed

VOCAB, LENGTH, ANCHORS = 48, 14, [1, 3, 7, 8]
ODD = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 37}
GROUPS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2}
WINDOWS = {"sliding_window": 64, "use_sliding_window": True, "num_hidden_layers": 2}
WINDOWS |= {"layer_types": ["sliding_attention", "full_attention"]}
BOTH_SIDES = {"sliding_window_non_causal": True}
FEW = {"draft_vocab_size": 31}
# Changes of the layers, and of the rest.
CASES = {
    ("dflash", "plain"): ({}, {}),
    ("dflash", "odd heads"): (ODD | {"num_hidden_layers": 3}, {"block_size": 3}),
    ("dflash", "causal windows"): (WINDOWS, {}),
    ("dflash", "windows to both sides"): (WINDOWS | GROUPS, BOTH_SIDES),
    ("dflash", "the anchor drafts"): (GROUPS, {"sample_from_anchor": True, "block_size": 2}),
    ("dflash", "draft vocabulary"): (ODD, FEW),
    ("dflash2", "plain"): ({}, {}),
    ("dflash2", "odd heads"): (ODD | {"num_hidden_layers": 2}, {"conv_group_size": 32}),
    ("dflash2", "windows to both sides"): (WINDOWS, {"selector_rank": 1}),
    ("dflash2", "causal windows"): (WINDOWS, {"sliding_window_non_causal": False}),
    ("dflash2", "three taps"): (GROUPS, {"conv_kernel_size": 3, "selector_top_k": 1}),
    ("dflash2", "one tap"): ({}, {"conv_kernel_size": 1, "selector_top_k": 48}),
    ("dspark", "vanilla"): (ODD, {"markov_rank": 1}),
    ("dspark", "gated"): (WINDOWS, {"markov_head_type": "gated"}),
    ("dspark", "gated, draft vocabulary"): (GROUPS, {"markov_head_type": "gated"} | FEW),
    ("dspark", "gated, the anchor does not draft"): (
        ODD,
        {"markov_head_type": "gated", "sample_from_anchor": False},
    ),
    ("dspark", "recurrent"): (WINDOWS | ODD, {"markov_head_type": "rnn"} | BOTH_SIDES),
    ("dspark", "recurrent, draft vocabulary"): (
        {"num_hidden_layers": 2},
        {"markov_head_type": "rnn", "confidence_head_with_markov": False, "block_size": 2} | FEW,
    ),
    ("dspark", "without a confidence head"): ({}, {"enable_confidence_head": False}),
}
DEFAULTS = {
    "dflash": {},
    "dflash2": {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 8},
    "dspark": {"markov_rank": 6},
}


@pytest.fixture(scope="module")
def target():
    return spread_model(VOCAB, num_layers=3)


def their_model(method, target, layers, fields):
    """Returns a model of their package with random weights."""
    import torch
    import transformers
    from speculators import SpeculatorModel, SpeculatorModelConfig

    package("speculators", f"speculators.models.{method}")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    layer = transformers.Qwen3Config(vocab_size=VOCAB, **sizes | layers)
    layer._attn_implementation = "eager"
    block = {"draft_vocab_size": VOCAB, "block_size": 5, "mask_token_id": 47}
    config = SpeculatorModelConfig.registry[method](
        transformer_layer_config=layer,
        aux_hidden_state_layer_ids=[0, 2, 3],
        **block | DEFAULTS[method] | fields,
    )
    model = SpeculatorModel.registry[method](config).eval()
    rng = np.random.default_rng(2)
    for name, weights in model.named_parameters():
        size = 0.3 if weights.ndim == 1 else 0.9 * weights.shape[-1] ** -0.5
        drawn = name.endswith("norm.weight") + size * rng.standard_normal(weights.shape)
        weights.data = torch.from_numpy(drawn.astype(np.float32))
    kernel, ids = np.array(target.params["head"]["kernel"].T), np.arange(VOCAB)
    if config.draft_vocab_size < VOCAB:
        ids = np.sort(rng.permutation(VOCAB)[: config.draft_vocab_size])
        offsets = torch.from_numpy(ids - np.arange(len(ids)))
        model.load_vocab_mappings(torch.from_numpy(np.isin(np.arange(VOCAB), ids)), offsets)
    model.lm_head.weight.data = torch.from_numpy(kernel[ids])
    table = np.array(target.params["embed"]["embedding"])
    model.embed_tokens.weight.data = torch.from_numpy(table)
    return model


def their_logits(method, model, tokens, taps):
    """Returns the logits [A, P, R] of the blocks' slots, and confidences [A, P] or None."""
    import torch

    core = package("speculators", f"speculators.models.{method}.core")
    mask = torch.zeros(1, LENGTH)
    mask[0, ANCHORS] = 1  # so that these anchors are drawn
    zeros = torch.zeros(1, LENGTH, 32), torch.zeros(1, LENGTH, dtype=torch.long)
    text = torch.from_numpy(taps), torch.from_numpy(tokens).long()
    blocks, most = (len(ANCHORS), model.block_size), {"max_anchors": len(ANCHORS)}
    if method == "dflash2":
        with torch.no_grad():
            outputs, own, *_, index = model._backbone_forward(*text, mask, *zeros, **most)
            before = model._predecessor_ids(text[1], index).reshape(1, -1)
            ids, scores = model.candidate_selector.select(own, outputs, before)
        lowest = torch.full_like(own, torch.finfo(torch.float32).min / 2)
        return lowest.scatter(-1, ids, scores).reshape(*blocks, -1).numpy(), None
    metrics = mock.patch.object(core, "compute_metrics", return_value=(torch.zeros(()), {}))
    with metrics as watched, torch.no_grad():
        model(*text, mask, *zeros, **most)
    logits, _, confidences, *_ = watched.call_args[0]
    has_confidence = getattr(model, "confidence_head", None) is not None
    confidences = confidences.reshape(*blocks).numpy() if has_confidence else None
    return logits.reshape(*blocks, -1).numpy(), confidences


@functools.partial(jax.jit, static_argnums=0)
def our_logits(drafter, params, tokens, taps):
    """Returns the logits [T, K, R] of blocks at each anchor from 1 on, and confidences [T, K]."""
    features, logits, confidences = drafter.fuse(params, taps[:, :-1]), [], []
    for outputs in drafter.unrolled(params, tokens[:, 1:], features, drafter.max_steps):
        logits.append(drafter.draft_logits(params, outputs)[0])
        if getattr(drafter, "has_confidence", False):
            width, rank = drafter.config.d_model, drafter.markov_rank
            read = outputs[..., :width], outputs[..., width : width + rank]
            confidences.append(drafter.confidence(params, *read)[0])
    return jnp.stack(logits, axis=1), jnp.stack(confidences, axis=1) if confidences else None


@pytest.mark.parametrize(("method", "name"), CASES, ids=map(", ".join, CASES))
def test_block_has_the_logits_of_speculators(target, tmp_path, method, name):
    """On the text's own tokens. A folder that is written again gives the same drafter."""
    package("speculators")
    model = their_model(method, target, *CASES[method, name])
    model.save_pretrained(tmp_path / "theirs")
    loaded = spsjax.load_drafter(tmp_path / "theirs", target)
    drafter, rng = loaded.drafter, np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, (1, LENGTH)).astype(np.int32)
    taps = rng.standard_normal((1, LENGTH, 96)).astype(np.float32)
    theirs, their_confidences = their_logits(method, model, tokens, taps)
    ours, confidences = our_logits(drafter, loaded.with_target(target.params), tokens, taps)
    rows, first = np.asarray(ANCHORS) - 1, 1 - drafter.anchor_drafts
    np.testing.assert_allclose(np.asarray(ours)[rows], theirs[:, first:], atol=1e-4, rtol=0)
    assert np.ptp(theirs[theirs > -1e30]) > 2
    assert (confidences is None) == (their_confidences is None)
    if confidences is not None:
        mine = np.asarray(confidences)[rows]
        np.testing.assert_allclose(mine, their_confidences[:, first:], atol=1e-4)
    spsjax.save_drafter(tmp_path / "ours", loaded, target, "float32")
    again = spsjax.load_drafter(tmp_path / "ours", target)
    assert again.drafter == drafter
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    if drafter.own_head:  # in their layout, whose other tensors they read from the target
        loading.save(tmp_path / "target", target, "float32")
        named = dataclasses.replace(target, name=str(tmp_path / "target"))
        spsjax.save_drafter(tmp_path / "ours", loaded, named, "float32")
        copy = type(model).from_pretrained(tmp_path / "ours").state_dict()
        assert all(copy[key].equal(value) for key, value in saved(model).items())


def saved(model) -> dict:
    """Returns what they save of a model by its name, without copies of the target's tensors."""
    own = model.state_dict().items()
    return {key: value for key, value in own if not key.startswith(("embed", "verifier"))}
