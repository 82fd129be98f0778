"""The target drafts for itself with a small cache, and a draft model with a window."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model, nearby_model, spread_model

import spsjax
from spsjax import InputError, SamplingParams, caches, loading
from spsjax.drafters import draft_model, sparse_self
from spsjax.models import transformer
from spsjax.parallel import sharding

K, NEW = 3, 40
PROMPTS = [
    np.random.default_rng(row).integers(0, 48, size).tolist()
    for row, size in enumerate((60, 1, 33))
]
SMALL = {"sinks": 2, "recent": 12}
FAMILIES = {
    "rotary": {},
    "relative": {"positions": "relative", "ffn": "gelu"},
    "gemma": {"post_norms": True, "qk_norm": True, "windows": (9, 0), "rope_theta_local": 1e3},
}


@pytest.fixture(scope="module")
def target():
    return spread_model(48, num_layers=2, num_kv_heads=2, max_positions=256)


def drafter_of(target, **fields):
    return sparse_self.Drafter(target.config, K, **SMALL | fields)


def texts(target, drafter, **options):
    options = {"sampling": SamplingParams(0.0), "max_new_tokens": NEW, "seed": 2, **options}
    return spsjax.generate(target, PROMPTS, drafter, **options)


def assert_same(some, others):
    for tokens, expected in zip(some.tokens, others.tokens, strict=True):
        np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("chosen", (0, 64))
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_of_the_whole_text_accepts_everything(family, chosen, temperature):
    if chosen and family != "rotary":
        pytest.skip("chooses nothing in targets with windows or relative positions")
    target = spread_model(48, num_layers=2, max_positions=256, **FAMILIES[family])
    recent = 7 + NEW + K + 1 if chosen else 120
    drafter = drafter_of(target, recent=recent, chosen=chosen, observed=7)
    stats = texts(target, drafter, sampling=SamplingParams(temperature)).stats
    assert stats.acceptance_rate > 0.98
    assert sum(stats.accepted_histogram[:K]) <= len(PROMPTS)  # the last round is cut off


@pytest.mark.parametrize(
    "fields", ({}, {"chosen": 8, "observed": 6}, {"sinks": 0}), ids=("window", "chosen", "bare")
)
@pytest.mark.parametrize("count", (K, "auto"))
def test_greedy_text_is_the_targets(target, fields, count):
    out = texts(target, drafter_of(target, **fields), num_speculative_tokens=count)
    assert_same(out, texts(target, None))
    if count == K:
        assert 0.02 < out.stats.acceptance_rate < 0.98


def test_more_slots_accept_more(target):
    rates = [
        texts(target, drafter_of(target, recent=recent)).stats.acceptance_rate
        for recent in (4, 16, 60, 110)
    ]
    assert rates == sorted(rates) and rates[-1] > rates[0] + 0.1


def test_tree_of_a_small_cache_is_verified_like_any_other(target):
    tree = spsjax.Tree.branching(2, 2)
    loaded = spsjax.load_drafter("sparse_self:16", target, tree=tree)
    assert loaded.drafter.num_speculative_tokens == 2
    assert_same(texts(target, loaded), texts(target, None))


@pytest.mark.parametrize("length", (30, 3))
def test_tree_has_the_targets_distributions_if_its_cache_holds_the_text(target, length):
    tree = spsjax.Tree((0, 0, 1, 1, 2, 3))
    drafter = sparse_self.Drafter(target.config, recent=60, tree=tree)
    prompt = PROMPTS[0][:length]
    proposal = spsjax.propose(target, prompt, drafter)
    paths = drafting.paths(proposal)
    for node in tree.inner:
        text = np.asarray([[*prompt, *paths[node]]])
        logits = transformer.apply(target.config, target.params, text).logits[0, -1]
        np.testing.assert_allclose(proposal.probs[0, node], jax.nn.softmax(logits), atol=1e-5)


def test_choice_of_more_tokens_than_a_short_text_has_is_all_of_them(target):
    drafter = spsjax.load_drafter("sparse_self:256:chosen", target)
    stats = spsjax.generate(target, [[1, 2, 3], [4]], drafter, max_new_tokens=8).stats
    assert stats.acceptance_rate == 1


def test_engine_gives_the_text_of_a_call_whatever_its_chunks(target, tmp_path):
    """Chunks that do not add up to the buffers must not set a window back too far."""
    loading.save(tmp_path, nearby_model(target, distance=0.1), dtype="float32")
    prompt = np.random.default_rng(9).integers(0, 48, 165).tolist()
    for name in (f"window:64:{tmp_path}", "sparse_self:64:chosen"):
        drafter = spsjax.load_drafter(name, target)
        engine = spsjax.Engine(target, drafter, 3, rows=2, slots=192, chunk=80)
        for seed in range(2):
            request = engine.submit(prompt, SamplingParams(), 12, seed)
            alone = spsjax.generate(
                target,
                [prompt],
                drafter,
                3,
                sampling=SamplingParams(),
                max_new_tokens=12,
                seed=seed,
            )
            np.testing.assert_array_equal(request.result(), alone.tokens[0])


@pytest.mark.parametrize("heads", (2, 1), ids=("split", "copied"))
def test_mesh_gives_the_text_of_one_device(heads):
    """A model axis of 2 splits two key-value heads, and copies one."""
    single = spread_model(48, num_layers=2, num_kv_heads=heads, max_positions=256)
    split = build_model(single.config, single.params, sharding.mesh(1, 2))
    for fields in ({}, {"chosen": 8, "observed": 6}):
        for temperature in (0.0, 1.0):
            some, other = (
                texts(model, drafter_of(model, **fields), sampling=SamplingParams(temperature))
                for model in (single, split)
            )
            assert_same(some, other)
            assert some.stats == dataclasses.replace(other.stats, **_times(some.stats))


def _times(stats):
    return {
        field.name: getattr(stats, field.name)
        for field in dataclasses.fields(stats)
        if "seconds" in field.name
    }


def test_state_is_as_small_as_its_slots(target):
    drafter = drafter_of(target, chosen=8, observed=6)
    state = jax.eval_shape(lambda: drafter.init({"target": target.params}, 3, 10_000))
    assert isinstance(state, caches.ChosenCache)
    assert max(max(leaf.shape) for leaf in jax.tree.leaves(state)) <= 2 + 12 + 32


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_draft_model_with_a_wide_window_drafts_as_without(target, temperature, tmp_path):
    draft = nearby_model(target, distance=0.02)
    loading.save(tmp_path, draft, dtype="float32")
    sampling = SamplingParams(temperature)
    wide, narrow = (
        spsjax.load_drafter(f"window:{slots}:{tmp_path}", target) for slots in (130, 12)
    )
    assert isinstance(narrow.drafter, draft_model.Drafter) and narrow.max_positions is None
    whole = texts(target, draft, sampling=sampling)
    assert_same(texts(target, wide, sampling=sampling), whole)
    few = texts(target, narrow, sampling=sampling).stats
    assert few.acceptance_rate < whole.stats.acceptance_rate - 0.1


def test_window_of_a_draft_lets_texts_be_longer_than_its_context(target, tmp_path):
    draft = nearby_model(target)
    draft = build_model(dataclasses.replace(draft.config, max_positions=32), draft.params, None)
    loading.save(tmp_path, draft, dtype="float32")
    with pytest.raises(InputError, match="context of 32"):
        texts(target, draft)
    out = texts(target, spsjax.load_drafter(f"window:24:{tmp_path}", target))
    assert_same(out, texts(target, None))


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
    target = spread_model(48, **FAMILIES[family])
    with pytest.raises(InputError, match=r"^chosen: expected 0"):
        drafter_of(target, chosen=4, observed=4)


def test_drafter_of_another_target_is_refused(target):
    other = spread_model(48, num_layers=1)
    with pytest.raises(InputError, match="another shape of target"):
        texts(target, drafter_of(other))
