"""Assistants of Gemma 4: steps against NumPy and `transformers`, and their folders."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.bad_input import one_line
from helpers.calls import padded
from helpers.golden_folders import GOLDEN, rewrite
from helpers.models import tiny_config

import spsjax
from spsjax import DynamicTree, InputError, SamplingParams, Tree, decode, loading
from spsjax.drafters import gemma4_assistant
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.verifiers import match

VOCAB, K, WINDOW = 40, 3, 8
# One text is longer than the window, and one has no token before the root.
TEXTS = [[3, 4, 5, 3, 9, 1, 2, 7, 7, 30, 12, 13, 14], [9], [8, 6]]
CENTROIDS = {"num_centroids": 8, "top_centroids": 3}


@functools.cache
def target() -> loading.Model:
    """A target in which layers share keys, and differ in their heads."""
    return loading.load(GOLDEN / "gemma4", dtype="float32")


@functools.cache
def assistant(**fields) -> loading.LoadedDrafter:
    """Two layers with a window and one without, with random weights."""
    own = drafting.assistant_config(
        target().config,
        d_model=12,
        d_ff=12,
        num_layers=3,
        windows=(WINDOW, WINDOW, 0),
        changes=(*[(("mixer", "shared"),)] * 2, (("head_dim", 8), ("mixer", "shared"))),
        layer_inputs=0,
        layer_input_rows=0,
        bos_id=None,
    )
    drafter = gemma4_assistant.Drafter(target().config, config=own, **fields)
    weights = drafting.random_weights(drafter)
    if fields:
        ordering = np.random.default_rng(3).permutation(VOCAB).astype(np.int32)
        weights |= {"ordering": ordering}
    return loading.LoadedDrafter("assistant", drafter, weights)


def norm(x, weights):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weights["scale"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rotated(x_HC, position, theta, share=1.0):
    half = x_HC.shape[1] // 2
    turns = position * theta ** (-2 * np.arange(half) / x_HC.shape[1])
    turns[int(share * half) :] = 0
    first, second = x_HC[:, :half], x_HC[:, half:]
    cos, sin = np.cos(turns), np.sin(turns)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def attended(query_HC, keys_GSC, values_GSC, first):
    """Returns the mean of the values from slot `first` on, one head after another."""
    repeats = len(query_HC) // len(keys_GSC)
    mixed = np.zeros_like(query_HC)
    for head, query in enumerate(query_HC):
        keys, values = keys_GSC[head // repeats, first:], values_GSC[head // repeats, first:]
        if len(keys):
            weights = np.exp(keys @ query - np.max(keys @ query))
            mixed[head] = weights @ values / weights.sum()
    return mixed.reshape(-1)


def step(weights, config, read, embedded, hidden, position):
    """Returns the output of one step, in which all queries have the root's position."""
    x = np.concatenate([embedded, hidden]) @ weights["pre_projection"]["kernel"]
    for index in range(config.num_layers):
        layer, own = config.layer(index), weights["layers"][index]
        kernels = {name: own["attention"][name]["kernel"] for name in ("query", "out")}
        query = (norm(x, own["attention_norm"]) @ kernels["query"]).reshape(-1, layer.head_dim)
        query = norm(query, own["attention"]["query_norm"])
        base = (1e4, 1.0) if layer.windows else (1e6, 0.25)
        first = max(position - WINDOW + 1, 0) if layer.windows else 0
        mixed = attended(rotated(query, position, *base), *read[index], first)
        x = x + norm(mixed @ kernels["out"], own["attention_post_norm"])
        fed, ffn = norm(x, own["ffn_norm"]), {key: own["ffn"][key]["kernel"] for key in own["ffn"]}
        fed = gelu(fed @ ffn["gate"]) * (fed @ ffn["up"]) @ ffn["down"]
        x = (x + norm(fed, own["ffn_post_norm"])) * own["scale"]
    return norm(x, weights["norm"])


def expected(loaded, text, tokens):
    """Returns the distributions of a chain's tokens, computed step by step."""
    model, drafter = target(), loaded.drafter
    weights, n = jax.tree.map(np.asarray, loaded.params), len(text)
    output = forward(np.asarray([text], np.int32))
    table = np.asarray(model.params["embed"]["embedding"])
    # The last layers with keys of their own: layer 1 has full attention, and layer 2 a window.
    block = output.block.keys, output.block.values
    read = [tuple(np.asarray(side[i][0, :, : n - 1]) for side in block) for i in (2, 2, 1)]
    hidden = np.asarray(output.hidden)[0, n - 2] if n > 1 else np.zeros(16, np.float32)
    for token in [text[-1], *tokens[:-1]]:
        out = step(weights, drafter.config, read, table[token] * 4, hidden, n - 1)
        logits = weights["embed"]["embedding"] @ out
        if drafter.num_centroids:
            nearest = np.argsort(-(out @ weights["centroids"]["kernel"]))[: drafter.top_centroids]
            known = weights["ordering"].reshape(drafter.num_centroids, -1)[nearest]
            logits = np.where(np.isin(np.arange(VOCAB), known), logits, -np.inf)
        probs = np.exp(logits - logits.max())
        yield probs / probs.sum()
        hidden = out @ weights["post_projection"]["kernel"]


@jax.jit
def forward(tokens):
    return transformer.apply(target().config, target().params, tokens)


@pytest.mark.parametrize(
    "fields",
    [pytest.param({}, marks=pytest.mark.slow, id="dense"), pytest.param(CENTROIDS, id="centroids")],
)
def test_chain_has_the_distributions_of_single_steps(fields):
    """Behind texts that are longer and shorter than the window, and of one token."""
    loaded = assistant(**fields)
    proposal = proposed(loaded, target())
    assert (np.count_nonzero(proposal.probs, axis=-1) == (15 if fields else VOCAB)).all()
    for row, text in enumerate(TEXTS):
        drafted = np.asarray(proposal.tokens[row]).tolist()
        for depth, probs in enumerate(expected(loaded, text, drafted)):
            np.testing.assert_allclose(proposal.probs[row, depth], probs, atol=2e-5)


@pytest.mark.parametrize(
    "shape",
    [Tree((0, 0, 1, 1, 2, 4)), pytest.param(DynamicTree(7, K, 3), marks=pytest.mark.slow)],
    ids=["drawn", "dynamic"],
)
def test_tree_has_the_distributions_of_single_steps(shape):
    """Along the path to every node; a dynamic tree has the most probable tokens after a node."""
    loaded = assistant(**CENTROIDS)
    proposal = proposed(loaded, target(), shape=shape)
    for row, text in enumerate(TEXTS):
        paths = drafting.paths(proposal, row)
        for node, path in enumerate(paths):
            drafted = [below[-1] for below in paths if below[:-1] == path and below]
            *_, probs = expected(loaded, text, [*path, 0])
            if isinstance(shape, DynamicTree):
                assert sorted(drafted) == sorted(np.argsort(-probs)[: len(drafted)])
            elif drafted:
                assert len(set(drafted)) == len(drafted) and (probs[drafted] > 0).all()
                np.testing.assert_allclose(proposal.probs[row, node], probs, atol=2e-5)


def with_shape(loaded, shape):
    length = shape.depth if shape else K
    return dataclasses.replace(loaded.drafter, tree=shape, num_speculative_tokens=length)


def proposed(loaded, model, texts=(*TEXTS, TEXTS[0]), shape=None):
    """Returns the drafts after some texts, without filters."""
    program = decode.Program(model.config, with_shape(loaded, shape), match.Verifier())
    inputs = padded(texts, 16)
    return drafting.proposed_after(program, loaded.with_target(model.params), *inputs, 32)


@pytest.mark.slow
@pytest.mark.parametrize("replicate", [None, False])
def test_eight_devices_draft_what_one_does(tmp_path, replicate):
    """With whole weights on each device, and with weights that are split."""
    spsjax.save_drafter(tmp_path, assistant(**CENTROIDS), target(), "float32")
    model = loading.load(GOLDEN / "gemma4", sharding.mesh(2, 4), "float32")
    loaded = spsjax.load_drafter(tmp_path, model, replicate)
    with model.in_mesh():
        ours = proposed(loaded, model)
    alone = proposed(assistant(**CENTROIDS), target())
    np.testing.assert_array_equal(ours.tokens, alone.tokens)
    np.testing.assert_allclose(ours.probs, alone.probs, atol=1e-4)


def test_greedy_text_is_that_of_the_target():
    """The target's layers without keys are read through all caches of the loop."""
    with np.load(GOLDEN / "gemma4" / "expected.npz") as recorded:
        prompt, text = recorded["tokens"][0].tolist(), recorded["greedy"].tolist()
    options = {"max_new_tokens": len(text), "stop_at_eos": False}
    greedy = SamplingParams(temperature=0.0)
    with drafting.small_programs():
        out = spsjax.generate(target(), [prompt], assistant(), K, greedy, **options)
    assert out.tokens[0].tolist() == text


def test_folder_with_centroids_is_loaded_unchanged(tmp_path):
    head = assistant(**CENTROIDS)
    spsjax.save_drafter(tmp_path, head, target(), "float32")
    again = spsjax.load_drafter(tmp_path, target())
    assert again.drafter == head.drafter
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


TEXT = "text_config."
ORDERING = "masked_embedding.token_ordering"


@pytest.mark.parametrize(
    ("fields", "tensors", "named"),
    [
        ({"backbone_hidden_size": 32}, {}, "backbone_hidden_size"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings"),
        ({TEXT + "model_type": "gemma3_text"}, {}, "text_config.model_type"),
        ({TEXT + "num_kv_shared_layers": 2}, {}, "text_config.num_kv_shared_layers"),
        ({TEXT + "hidden_size_per_layer_input": 4}, {}, "text_config.hidden_size_per_layer_input"),
        ({TEXT + "final_logit_softcapping": 30.0}, {}, "text_config.final_logit_softcapping"),
        ({TEXT + "enable_moe_block": True}, {}, "text_config.enable_moe_block"),
        ({TEXT + "vocab_size": 48}, {}, "vocab_size"),
        ({TEXT + "sliding_window": 1}, {}, "text_config.sliding_window"),
        ({TEXT + "global_head_dim": 6}, {}, "head_dim"),
        ({"num_centroids": 7}, {}, "num_centroids"),
        ({"centroid_intermediate_top_k": 9}, {}, "centroid_intermediate_top_k"),
        ({}, {ORDERING: None}, ORDERING),
        ({}, {ORDERING: np.zeros(VOCAB, np.int64)}, ORDERING),
        ({}, {ORDERING: np.arange(9)}, ORDERING),
        ({"use_ordered_embeddings": False}, {}, "masked_embedding"),
    ],
)
def test_unsupported_folder_is_refused_by_the_key(tmp_path, fields, tensors, named):
    spsjax.save_drafter(tmp_path, assistant(**CENTROIDS), target(), "float32")
    raw = json.loads((tmp_path / "config.json").read_text())
    inner = {key.removeprefix(TEXT): value for key, value in fields.items() if TEXT in key}
    fields = {key: value for key, value in fields.items() if TEXT not in key}
    fields["text_config"] = raw["text_config"] | inner
    rewrite(tmp_path, fields, tensors)
    with one_line(named, "expected"):
        spsjax.load_drafter(tmp_path, target())


def test_target_without_a_window_is_refused():
    config = assistant().drafter.config
    with pytest.raises(InputError, match="expected a target with a window in some layer"):
        gemma4_assistant.Drafter(tiny_config(VOCAB), config=config)


def test_assistant_of_a_config_is_planned_and_not_trained():
    """It reads the last layer of either kind, whose heads may differ."""
    layers = {"windows": (4, 4, 0), "changes": ((), (), (("head_dim", 8), ("num_kv_heads", 1)))}
    shape = tiny_config(VOCAB, num_layers=6, **layers)
    drafter = gemma4_assistant.Drafter.from_config({"d_model": 16, "num_layers": 3}, shape)
    assert [drafter._source(layer) for layer in range(3)] == [4, 4, 5]
    assert (drafter.config.d_model, drafter.config.d_ff) == (16, shape.d_ff)
    with one_line("gemma4_assistant", "can be trained"):
        next(iter(drafter.unrolled({}, None, None, 1)))
    alone = gemma4_assistant.Drafter.from_config({}, tiny_config(VOCAB))
    assert [alone._source(layer) for layer in range(4)] == [0] * 4
    with one_line("drafter.nodes", "no such key"):
        gemma4_assistant.Drafter.from_config({"nodes": 1}, shape)


SMALL = {
    "vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "global_head_dim": 8, "hidden_size_per_layer_input": 0, "initializer_range": 0.4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {"s": "sliding_attention", "f": "full_attention"}
THEIRS = {
    "dense, shared keys": ({"num_kv_shared_layers": 2}, {"num_attention_heads": 2}, {}),
    "centroids": ({}, {}, {"num_centroids": 10, "centroid_intermediate_top_k": 4}),
    "keys as values": ({"attention_k_eq_v": True, "num_global_key_value_heads": 1},) * 2 + ({},),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIRS)
def test_chain_has_the_distributions_of_transformers(name, tmp_path):
    """Their window counts from the last key, and includes both ends: it is two tokens wider."""
    torch = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[parity]'")
    transformers = pytest.importorskip("transformers", reason="needs the extra parity")
    if not hasattr(transformers, "Gemma4AssistantConfig"):
        pytest.skip("transformers is older than assistants of Gemma 4")
    changes, own, fields = THEIRS[name]
    torch.manual_seed(1)
    shape = SMALL | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    shape |= {"layer_types": [KINDS[kind] for kind in "sfsf"], "sliding_window": WINDOW} | changes
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**shape)).eval()
    text = SMALL | {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3}
    text |= {"layer_types": [KINDS[kind] for kind in "ssf"], "sliding_window": WINDOW - 2}
    text |= {"vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3} | own
    helper = transformers.Gemma4AssistantForCausalLM(
        transformers.Gemma4AssistantConfig(
            text_config=transformers.Gemma4TextConfig(**text),
            backbone_hidden_size=16,
            use_ordered_embeddings=bool(fields),
            **fields,
        )
    ).eval()
    with torch.no_grad():
        for path, tensor in [*helper.named_parameters(), *helper.named_buffers()]:
            if tensor.ndim == 1 and path.endswith(("weight", "layer_scalar")):
                tensor.add_(0.3 * torch.randn_like(tensor))
        if fields:
            helper.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.save_pretrained(tmp_path / "target")
    helper.save_pretrained(tmp_path / "assistant")
    inner = json.loads((tmp_path / "assistant" / "config.json").read_text())["text_config"]
    rewrite(tmp_path / "assistant", {"text_config": inner | {"sliding_window": WINDOW}})
    ours = loading.load(tmp_path / "target", dtype="float32")
    loaded = spsjax.load_drafter(tmp_path / "assistant", ours)
    tokens = np.random.default_rng(4).integers(3, VOCAB, 14)
    proposal = proposed(loaded, ours, [tokens.tolist()])
    text = torch.from_numpy(tokens[None])
    with torch.no_grad():
        output = model(text[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        hidden, last = output.hidden_states[-1][:, -1:], text[:, -1:]
        for depth in range(K):
            embedded = model.get_input_embeddings()(last)
            out = helper(
                inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=output.shared_kv_states,
            )
            probs, now = np.asarray(proposal.probs[0, depth]), out.logits[0, 0]
            if fields:  # their other tokens have a small probability
                assert np.count_nonzero(probs) == 16
                now = torch.where(torch.from_numpy(probs > 0), now, -torch.inf)
            np.testing.assert_allclose(probs, torch.softmax(now, -1).numpy(), atol=2e-5)
            last = torch.tensor([[int(proposal.tokens[0, depth])]])
            hidden = out.last_hidden_state
