"""The target drafts for itself with a small cache, and a draft model with a window.

A small cache drafts badly, and a cache of the whole text drafts what the target would say.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import assert_same_texts, padded
from helpers.models import FAMILIES, build_model
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

import spsjax
from spsjax import InputError, SamplingParams, Tree, decode, loading
from spsjax.drafters import draft_model, sparse_self
from spsjax.models import caches, transformer
from spsjax.parallel import sharding
from spsjax.verifiers import match

K, NEW = 3, 40
PROMPTS = [
    np.random.default_rng(row).integers(0, 48, size).tolist()
    for row, size in enumerate((60, 1, 33))
]
SMALL = {"sinks": 2, "recent": 12}


@pytest.fixture(scope="module")
def target():
    return numpy_spread_model(48, num_layers=2, num_kv_heads=2, max_positions=256)


def drafter_of(target, **fields):
    return sparse_self.Drafter(target.config, K, **SMALL | fields)


def texts(target, drafter, **options):
    options = {"sampling": SamplingParams(0.0), "max_new_tokens": NEW, "seed": 2, **options}
    return spsjax.generate(target, PROMPTS, drafter, **options)


TREE = Tree((0, 0, 1))
ROWS = 16


@functools.partial(jax.jit, static_argnums=0)
def logits_after(config, params, texts, last):
    """Returns the logits [R, V] after index `last` [R] of texts."""
    logits = transformer.apply(config, params, texts).logits
    return logits[np.arange(len(texts)), last]


def check_distributions(target, drafter, prompts, draft=None):
    """Asserts that a draft has a model's distributions, after each node's own path of tokens."""
    model = draft or target
    program = decode.Program(target.config, drafter, match.Verifier())
    params = {"target": target.params, "drafter": draft.params if draft else {}}
    proposal = jax.device_get(drafting.proposed_after(program, params, *padded(prompts, 64), 96))
    texts, last, nodes = np.zeros((ROWS, 80), np.int32), np.zeros(ROWS, int), []
    for row, prompt in enumerate(prompts):
        paths = drafting.paths(proposal, row)
        for node in range(proposal.probs.shape[1]) if drafter.tree is None else TREE.inner:
            text = [*prompt, *paths[node]]
            texts[len(nodes), : len(text)], last[len(nodes)] = text, len(text) - 1
            nodes.append((row, node))
    logits = np.asarray(logits_after(model.config, model.params, texts, last))
    for (row, node), line in zip(nodes, logits):
        probs = np.exp(line - line.max())
        np.testing.assert_allclose(proposal.probs[row, node], probs / probs.sum(), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("rotary", {"sinks": 0, "recent": 12, "chosen": 36, "observed": 7, "tree": TREE}),
        pytest.param("gemma", {"recent": 45}, marks=pytest.mark.slow),
        pytest.param("relative", {"recent": 45, "tree": TREE}, marks=pytest.mark.slow),
    ],
    ids=("chosen", "gemma", "relative"),
)
def test_cache_of_the_whole_text_has_the_targets_distributions(family, fields):
    """Also of texts with fewer tokens than are chosen; not of texts with more than it holds."""
    target = numpy_spread_model(48, num_layers=2, max_positions=256, **FAMILIES[family])
    drafter = sparse_self.Drafter(target.config, None if "tree" in fields else K, **fields)
    check_distributions(target, drafter, (PROMPTS[0][:41], PROMPTS[0][:3]))
    with pytest.raises(AssertionError):
        check_distributions(target, drafter, (PROMPTS[0], PROMPTS[0][:3]))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "chosen"), [("gemma", 0), ("rotary", 64)])
def test_cache_of_the_whole_text_accepts_everything(family, chosen):
    """After any number of rounds, also in rows with fewer tokens than are chosen."""
    target = numpy_spread_model(48, num_layers=2, max_positions=256, **FAMILIES[family])
    recent = 7 + NEW + K + 1 if chosen else 120
    drafter = drafter_of(target, recent=recent, chosen=chosen, observed=7)
    stats = texts(target, drafter, sampling=SamplingParams([0.0, 1.0, 0.8])).stats
    assert stats.acceptance_rate > 0.98
    assert sum(stats.accepted_histogram[:K]) <= len(PROMPTS)  # the last round is cut off


@pytest.mark.slow
@pytest.mark.parametrize("name", ("window", "chosen"))
def test_engine_gives_the_text_of_a_call_whatever_its_chunks(target, tmp_path, name):
    """Of a text that may be longer than the context of a draft with a window."""
    draft = numpy_nearby_model(target, distance=0.1)
    draft = build_model(dataclasses.replace(draft.config, max_positions=64), draft.params, None)
    loading.save(tmp_path, draft, dtype="float32")
    prompt = np.random.default_rng(9).integers(0, 48, 165).tolist()
    name = {"window": f"window:64:{tmp_path}", "chosen": "sparse_self:64:chosen"}[name]
    drafter = spsjax.load_drafter(name, target)
    engine = spsjax.Engine(target, drafter, K, rows=1, slots=192, chunk=80)
    for seed in range(2):
        options = SamplingParams(), 12, seed
        alone = spsjax.generate(target, [prompt], drafter, K, *options)
        np.testing.assert_array_equal(engine.submit(prompt, *options).result(), alone.tokens[0])


@pytest.mark.slow
@pytest.mark.parametrize("heads", (2, 1), ids=("split", "copied"))
def test_mesh_gives_the_text_of_one_device(heads):
    """A model axis of 2 splits two key-value heads, and copies one. Each chooses for itself."""
    single = numpy_spread_model(48, num_kv_heads=heads, max_positions=256)
    split = build_model(single.config, single.params, sharding.mesh(1, 2))
    some, other = (
        texts(
            model, drafter_of(model, chosen=8, observed=6), sampling=SamplingParams([0.0, 1.0, 0.8])
        )
        for model in (single, split)
    )
    assert_same_texts(some.tokens, other.tokens)
    one, many = (
        {name: value for name, value in vars(out.stats).items() if "seconds" not in name}
        for out in (some, other)
    )
    assert one == many


def test_state_is_as_small_as_its_slots(target):
    drafter = drafter_of(target, chosen=8, observed=6)
    state = jax.eval_shape(lambda: drafter.init({"target": target.params}, 3, 10_000))
    assert isinstance(state, caches.ChosenCache)
    assert max(max(leaf.shape) for leaf in jax.tree.leaves(state)) <= 2 + 12 + 32


def test_draft_model_with_a_wide_window_has_its_distributions(target, tmp_path):
    """Of texts that the window holds, and not of longer ones."""
    draft = numpy_nearby_model(target, distance=0.02)
    loading.save(tmp_path, draft, dtype="float32")
    drafter = spsjax.load_drafter(f"window:47:{tmp_path}", target).drafter
    assert isinstance(drafter, draft_model.Drafter)
    drafter = dataclasses.replace(drafter, num_speculative_tokens=K)
    check_distributions(target, drafter, (PROMPTS[0][:41], PROMPTS[0][:3]), draft)
    with pytest.raises(AssertionError):
        check_distributions(target, drafter, (PROMPTS[0], PROMPTS[0][:3]), draft)


def test_window_of_a_draft_has_no_context(target, tmp_path):
    """Texts may be longer than the draft's own context."""
    draft = numpy_nearby_model(target)
    draft = build_model(dataclasses.replace(draft.config, max_positions=32), draft.params, None)
    loading.save(tmp_path, draft, dtype="float32")
    with pytest.raises(InputError, match="context of 32"):
        texts(target, draft)
    assert spsjax.load_drafter(f"window:24:{tmp_path}", target).max_positions is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "sparse_self:9",
            r"sparse_self:9: expected a number of slots in \[10, 256\], .* found '9'",
        ),
        ("sparse_self:257", "sparse_self:257: expected a number of slots"),
        ("sparse_self:", "sparse_self:: expected a number of slots"),
        ("sparse_self:64:some", 'sparse_self:64: expected nothing or ":chosen" behind it'),
        ("sparse_self:64:", 'sparse_self:64: expected nothing or ":chosen" behind it'),
        ("window:64:window:32:int8", "window:64:window:32:int8: expected .* a draft model"),
        ("window:64:", "window:64:: expected .* a draft model"),
        ("window:64:ngram", "window:64:ngram: expected a draft model behind the number"),
        ("window:x:int8", "window:x:int8: expected a number of slots"),
    ],
)
def test_bad_names_are_refused_in_one_line(target, name, message):
    with pytest.raises(InputError, match=f"^{message}"):
        spsjax.load_drafter(name, target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recent": 0}, "recent: expected"),
        ({"sinks": -1}, "sinks: expected"),
        ({"chosen": 1.5}, "chosen: expected"),
        ({"chosen": 4, "observed": 13}, "observed: expected at most recent=12, found 13"),
        ({"pooled": 4}, "pooled: expected an odd number, found 4"),
    ],
)
def test_bad_fields_are_refused(target, fields, message):
    with pytest.raises(InputError, match=f"^{message}"):
        drafter_of(target, **fields)


@pytest.mark.parametrize("family", ("relative", "gemma"))
def test_choice_is_refused_where_heads_would_need_positions(family):
    target = numpy_spread_model(48, **FAMILIES[family])
    with pytest.raises(InputError, match=r"^chosen: expected 0"):
        drafter_of(target, chosen=4, observed=4)


def test_drafter_of_another_target_is_refused(target):
    other = numpy_spread_model(48, num_layers=1)
    with pytest.raises(InputError, match="another shape of target"):
        texts(target, drafter_of(other))
