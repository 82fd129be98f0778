"""Vocabularies that are padded, and pairs that are padded differently."""

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from bad_input import one_line
from conftest import logits_of, nearby_model, spread_model, spread_params, tiny_config
from statistical_test import SUSPICIOUS, g_test, perturbed

import spsjax
from spsjax import SamplingParams, loading, tokenization
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding
from spsjax.training import step as train_step

PIECES, TARGET_ROWS, DRAFT_ROWS = 300, 328, 304


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return tokenization.train(["def f(x):\n    return x\n" * 9, "import os\n" * 9], path, PIECES)


def folder_of(path, pieces, rows, seed=0, **changes):
    """A folder of a model that likes nothing so much as padding."""
    config = tiny_config(rows, **changes)
    params = spread_params(config, seed)
    name = ("embed", "embedding") if config.tie_embeddings else ("head", "kernel")
    weights = np.array(params[name[0]][name[1]])
    if config.tie_embeddings:
        weights[PIECES:] *= 50
    else:
        weights[:, PIECES:] *= 50
    params[name[0]][name[1]] = jnp.asarray(weights)
    hf_weights.save(path, config, params, "float32")
    pieces.save(path)
    return path


def test_padding_is_never_sampled(pieces, tmp_path):
    folder = folder_of(tmp_path, pieces, TARGET_ROWS, tie_embeddings=True)
    model = loading.load(folder)
    assert (model.config.vocab_size, model.config.vocab_rows) == (PIECES, TARGET_ROWS)
    temperatures = SamplingParams(temperature=[0.0, 1.0, 5.0] * 8)
    for drafter in (None, model):
        prompts = [[1, 2, 3 + row] for row in range(24)]
        out = spsjax.generate(model, prompts, drafter, None, temperatures, 12, stop_at_eos=False)
        assert np.max(out.tokens) < PIECES


def test_the_weights_of_padding_are_kept(pieces, tmp_path):
    folder = folder_of(tmp_path / "one", pieces, TARGET_ROWS)
    loading.save(tmp_path / "two", loading.load(folder), "float32")
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_an_end_beyond_the_tokenizer_is_kept(pieces, tmp_path):
    """Tuned models sometimes have one that only their config knows."""
    folder = folder_of(tmp_path, pieces, TARGET_ROWS)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": PIECES + 1}))
    assert loading.load(folder).config.vocab_size == PIECES + 2


def test_the_ends_of_the_generation_config_go_first(pieces, tmp_path):
    folder = folder_of(tmp_path, pieces, TARGET_ROWS, eos_ids=(2,))
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    assert loading.load(folder).config.eos_ids == (2, 7)
    path.write_text('{"temperature": 0.6}')
    assert loading.load(folder).config.eos_ids == (2,)
    path.write_text('{"eos_token_id": "x"}')
    with one_line("generation_config.json", "eos_token_id"):
        loading.load(folder)


@pytest.mark.parametrize("rows", [PIECES, TARGET_ROWS + 24])
def test_a_pair_of_one_tokenizer_and_different_padding(pieces, tmp_path, rows):
    target = loading.load(folder_of(tmp_path / "target", pieces, TARGET_ROWS))
    draft = loading.load(folder_of(tmp_path / "draft", pieces, rows))
    prompts, greedy = [[1, 2, 3], [5, 6]], SamplingParams(temperature=0.0)
    out = spsjax.generate(target, prompts, draft, 3, greedy, 16, stop_at_eos=False)
    plain = spsjax.generate(target, prompts, None, None, greedy, 16, stop_at_eos=False)
    assert np.array_equal(out.tokens, plain.tokens)


def test_a_mesh_that_divides_the_padding_alone(pieces, tmp_path):
    folder = folder_of(tmp_path, pieces, TARGET_ROWS)
    mesh = sharding.mesh(1, 8)
    assert PIECES % 8 and not TARGET_ROWS % 8
    model, split = loading.load(folder), loading.load(folder, mesh)
    assert split.params["head"]["kernel"].addressable_shards[0].data.shape[1] == TARGET_ROWS // 8
    tokens = np.arange(24).reshape(2, 12)
    expected = train_step.forward(model.config, model.params, tokens).logits
    assert expected.shape == (2, 12, PIECES)
    with split.in_mesh():
        found = jax.jit(lambda params: train_step.forward(split.config, params, tokens).logits)(
            split.params
        )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    one, other = (
        spsjax.generate(each, ["def f"], each, 3, max_new_tokens=12).tokens
        for each in (model, split)
    )
    assert np.array_equal(one, other)


class Silent:
    """A tokenizer of whatever ids there are."""

    def decode(self, ids):
        return ""


def of_width(model, size):
    """The model with tokens cut off, or strangers added: its vocabulary is `size`."""
    config = dataclasses.replace(model.config, vocab_size=size)
    strangers = spread_params(config, 9)
    kept = min(size, model.config.vocab_size)
    params = dict(model.params)
    for name, leaf, axis in (("embed", "embedding", 0), ("head", "kernel", 1)):
        index = (slice(kept),) if axis == 0 else (slice(None), slice(kept))
        params[name] = {leaf: strangers[name][leaf].at[index].set(model.params[name][leaf][index])}
    return dataclasses.replace(model, config=config, params=params)


@pytest.mark.parametrize("size", [3, 6])
def test_the_law_is_the_target_s_whatever_the_draft_s_vocabulary(small_target, small_draft, size):
    silent, prompt, new = Silent(), [1, 2, 1], 3
    target = dataclasses.replace(small_target, tokenizer=silent)
    draft = dataclasses.replace(of_width(small_draft, size), tokenizer=silent)
    law = reference.joint_law(logits_of(small_target), prompt, len(prompt) + new)
    counts = collections.Counter()
    for seed in range(3):
        out = spsjax.generate(target, [prompt] * 8192, draft, 2, max_new_tokens=new, seed=seed)
        counts.update(map(tuple, np.asarray(out.tokens).tolist()))
        assert out.stats.acceptance_rate > 0.2
    assert g_test(counts, law) > SUSPICIOUS
    assert g_test(counts, perturbed(law)) < SUSPICIOUS


def test_different_tokenizers_are_refused(pieces, tmp_path):
    other = tokenization.train(["once upon a time there was a fox\n" * 9], tmp_path / "other", 290)
    target = loading.load(folder_of(tmp_path / "target", pieces, TARGET_ROWS))
    draft = loading.load(folder_of(tmp_path / "draft", other, TARGET_ROWS))
    with one_line("draft", "tokenizer"):
        spsjax.generate(target, ["def"], draft)


def test_vocabularies_that_nothing_says_are_one(pieces, tmp_path):
    """A model without a tokenizer has as many ids as the other has rows, or is refused."""
    target = loading.load(folder_of(tmp_path, pieces, TARGET_ROWS))
    same, other = (nearby_model(spread_model(rows)) for rows in (TARGET_ROWS, DRAFT_ROWS))
    assert spsjax.generate(target, ["def"], same, max_new_tokens=4).texts
    with one_line("vocabulary", str(PIECES), str(DRAFT_ROWS)):
        spsjax.generate(target, ["def"], other)
    one, other = (nearby_model(spread_model(48, padded_vocab_size=rows)) for rows in (56, 64))
    assert len(spsjax.generate(one, [[1, 2]], other, max_new_tokens=4).tokens[0]) == 4


def test_a_text_of_tokens_that_the_model_does_not_have(pieces):
    """As a mark for pictures, or for padding, that a tokenizer has and a model has not."""
    ids = pieces.encode("def")
    model = dataclasses.replace(spread_model(max(ids)), tokenizer=pieces)
    with one_line("prompts[0]", f"[0, {max(ids)})", f"found {max(ids)}"):
        spsjax.generate(model, ["def"])


def test_fewer_rows_than_tokens():
    with one_line("padded_vocab_size", "40", "48"):
        tiny_config(48, padded_vocab_size=40)
