"""Tests of padded vocabularies, and of pairs with different padding."""

import collections
import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers import drafting, reference
from helpers.bad_input import one_line
from helpers.g_test import SUSPICIOUS, g_test, perturbed
from helpers.models import build_model, logits_of, tiny_config
from helpers.numpy_models import numpy_spread_model, numpy_spread_params

import spsjax
from spsjax import SamplingParams, loading
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding
from spsjax.runtime.batch import token_ids
from spsjax.training import step as train_step

PIECES, TARGET_ROWS, DRAFT_ROWS = 300, 328, 304
forward = jax.jit(train_step.forward, static_argnums=0)


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    with drafting.small_programs():
        yield


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer


def folder_of(path, tokenizer, rows, seed=0, **changes):
    """Writes a model folder whose model prefers the ids of padding."""
    config = tiny_config(rows, **changes)
    params = numpy_spread_params(config, seed)
    if config.tie_embeddings:
        params["embed"]["embedding"][PIECES:] *= 50
    else:
        params["head"]["kernel"][:, PIECES:] *= 50
    hf_weights.save(path, config, params, "float32")
    tokenizer.save(path)
    return path


def test_padding_is_never_sampled(tokenizer, tmp_path):
    folder = folder_of(tmp_path, tokenizer, TARGET_ROWS, tie_embeddings=True)
    model = loading.load(folder)
    assert (model.config.vocab_size, model.config.vocab_rows) == (PIECES, TARGET_ROWS)
    temperatures = SamplingParams(temperature=[0.0, 1.0, 5.0] * 8)
    prompts = [[1, 2, 3 + row] for row in range(24)]
    out = spsjax.generate(model, prompts, model, 3, temperatures, 12, stop_at_eos=False)
    assert np.max(out.tokens) < PIECES


def test_weights_of_padding_and_eos_id_beyond_tokenizer_are_kept(tokenizer, tmp_path):
    """The config of some fine-tuned models has an end-of-sequence id without a token."""
    folder = folder_of(tmp_path / "one", tokenizer, TARGET_ROWS)
    loading.save(tmp_path / "two", loading.load(folder), "float32")
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": PIECES + 1}))
    assert loading.load(folder).config.vocab_size == PIECES + 2


def test_text_ends_at_the_ids_of_config_generation_config_and_tokenizer(tokenizer, tmp_path):
    """Chat templates end turns with the tokenizer's, which generation configs may lack."""
    folder = folder_of(tmp_path, tokenizer, TARGET_ROWS, eos_ids=(5,))
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": [5, 7], "temperature": 0.6}')
    model = loading.load(folder)
    assert tokenizer.eos_id == 2 and model.config.eos_ids == (5, 7)
    assert model.eos_ids == (5, 7, 2)
    prompts = [[token] for token in range(3, 35)]
    free = spsjax.generate(model, prompts, max_new_tokens=24, stop_at_eos=False).tokens
    ended = spsjax.generate(model, prompts, max_new_tokens=24).tokens
    assert {int(tokens[-1]) for tokens in ended if len(tokens) < 24} >= {2}
    for whole, tokens in zip(free, ended):
        ends = np.flatnonzero(np.isin(whole, (2, 5, 7)))
        assert len(tokens) == (ends[0] + 1 if len(ends) else 24)
    path.write_text('{"eos_token_id": 7}')
    assert loading.load(folder).config.eos_ids == (5, 7)
    path.write_text('{"temperature": 0.6}')
    assert loading.load(folder).config.eos_ids == (5,)
    path.write_text('{"eos_token_id": "x"}')
    with one_line("generation_config.json", "eos_token_id"):
        loading.load(folder)


@pytest.mark.slow
def test_pair_with_different_padding_gives_target_text(tokenizer, tmp_path):
    """One draft has more rows; the other has no tokenizer, and could draft the ids of padding."""
    target = loading.load(folder_of(tmp_path / "target", tokenizer, TARGET_ROWS))
    wider = loading.load(folder_of(tmp_path / "draft", tokenizer, TARGET_ROWS + 24))
    prompts, greedy = [[1, 2, 3], [5, 6]], SamplingParams(temperature=0.0)
    plain, *others = (
        spsjax.generate(target, prompts, draft, 3, greedy, 16, stop_at_eos=False)
        for draft in (None, wider, numpy_spread_model(TARGET_ROWS))
    )
    assert all(np.array_equal(out.tokens, plain.tokens) for out in others)


@pytest.mark.slow
def test_mesh_that_divides_padded_rows_splits_the_head(tokenizer, tmp_path):
    folder = folder_of(tmp_path, tokenizer, TARGET_ROWS)
    mesh = sharding.mesh(1, 8)
    assert PIECES % 8 and not TARGET_ROWS % 8
    model, split = loading.load(folder), loading.load(folder, mesh)
    assert split.params["head"]["kernel"].addressable_shards[0].data.shape[1] == TARGET_ROWS // 8
    tokens = np.arange(24).reshape(2, 12)
    expected = forward(model.config, model.params, tokens).logits
    assert expected.shape == (2, 12, PIECES)
    with split.in_mesh():
        logits = forward(split.config, split.params, tokens).logits
    np.testing.assert_allclose(logits, expected, atol=1e-4)


class Silent:
    """A tokenizer that decodes all ids to nothing, and puts nothing before a text."""

    vocab_size, bos_id, eos_id = 0, None, None

    def decode(self, ids):
        return ""

    def encode(self, text):
        return []


def of_width(model, size):
    """Returns the model with its vocabulary cut or extended to `size`; new tokens are random."""
    config = dataclasses.replace(model.config, vocab_size=size)
    random = numpy_spread_params(config, 9)
    kept = min(size, model.config.vocab_size)
    params = dict(model.params)
    for name, leaf, axis in (("embed", "embedding", 0), ("head", "kernel", 1)):
        index = (slice(kept),) if axis == 0 else (slice(None), slice(kept))
        random[name][leaf][index] = np.asarray(params[name][leaf])[index]
        params[name] = {leaf: random[name][leaf]}
    return build_model(config, params, None)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("size", [3, 6])
def test_draft_vocabulary_of_any_size_is_lossless(small_target, small_draft, size):
    silent, prompt, new = Silent(), [1, 2, 1], 3
    target = dataclasses.replace(small_target, tokenizer=silent)
    draft = dataclasses.replace(of_width(small_draft, size), tokenizer=silent)
    expected = reference.joint_distribution(logits_of(small_target), prompt, len(prompt) + new)
    counts = collections.Counter()
    for seed in range(3):
        out = spsjax.generate(target, [prompt] * 8192, draft, 2, max_new_tokens=new, seed=seed)
        counts.update(map(tuple, np.asarray(out.tokens).tolist()))
        assert out.stats.acceptance_rate > 0.2
    assert g_test(counts, expected) > SUSPICIOUS
    assert g_test(counts, perturbed(expected)) < SUSPICIOUS


def with_more(tokenizer, *texts):
    longer = copy.copy(tokenizer)
    more = dict(enumerate(texts, tokenizer.vocab_size))
    longer.decode = lambda ids: ""
    longer.pieces, longer.vocab_size = tokenizer.pieces | more, tokenizer.vocab_size + len(texts)
    return longer


@pytest.mark.parametrize("longer", ["target", "draft"])
def test_pair_of_which_one_has_more_tokens_at_its_end_works(tokenizer, tmp_path, longer):
    more = with_more(tokenizer, "<think>", "</think>")
    sizes = {"target": PIECES, "draft": PIECES} | {longer: PIECES + 2}
    models = {}
    for name, size in sizes.items():
        one = loading.load(folder_of(tmp_path / name, tokenizer, size))
        config = dataclasses.replace(one.config, vocab_size=size, padded_vocab_size=0)
        own = more if name == longer else tokenizer
        models[name] = dataclasses.replace(one, config=config, tokenizer=own)
    target, draft = models["target"], models["draft"]
    prompts = [[1, 2, 3 + row] for row in range(8)]
    options = {"max_new_tokens": 12, "stop_at_eos": False, "sampling": SamplingParams(0.0)}
    plain = spsjax.generate(target, prompts, **options).tokens
    out = spsjax.generate(target, prompts, draft, 3, **options)
    np.testing.assert_array_equal(out.tokens, plain)


def test_pair_without_tokenizer_needs_equal_vocabularies(tokenizer, tmp_path):
    target = loading.load(folder_of(tmp_path, tokenizer, TARGET_ROWS))
    same, other = (numpy_spread_model(rows) for rows in (TARGET_ROWS, DRAFT_ROWS))
    assert loading.as_drafter(same, target).params is same.params
    with one_line("vocabulary", str(PIECES), str(DRAFT_ROWS)):
        spsjax.generate(target, ["def"], other)
    one, other = (numpy_spread_model(48, padded_vocab_size=rows) for rows in (56, 64))
    assert loading.as_drafter(other, one).params is other.params


@pytest.mark.parametrize(("of_config", "of_tokenizer"), [(5, None), (None, 6), (5, 6)])
def test_empty_text_is_the_beginning_of_a_sequence(of_config, of_tokenizer):
    model = numpy_spread_model(48, bos_id=of_config)
    tokenizer = Silent()
    tokenizer.bos_id = of_tokenizer
    model = dataclasses.replace(model, tokenizer=tokenizer)
    assert token_ids(model, [""]) == [[of_config or of_tokenizer]]
    for prompt in ("x", []):  # a text without tokens, and no tokens at all
        with one_line("prompts[0]: expected", "at least one token"):
            token_ids(model, [prompt])


def test_prompt_with_ids_beyond_the_model_is_refused(tokenizer):
    """Some tokenizers have tokens for images or padding that the model does not have."""
    ids = tokenizer.encode("def")
    model = dataclasses.replace(numpy_spread_model(max(ids)), tokenizer=tokenizer)
    with one_line("prompts[0]", f"[0, {max(ids)})", f"found {max(ids)}"):
        spsjax.generate(model, ["def"])
    with one_line("padded_vocab_size", "40", "48"):
        tiny_config(48, padded_vocab_size=40)
