"""Exact acceptance rates against the oracle's distributions, token classes, divergence."""

import dataclasses

import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model
from helpers.toy_language import forward

from spsjax import SamplingParams, generation, tokenization
from spsjax.benchmarks import acceptance_analysis
from spsjax.parallel import sharding
from spsjax.tokenization.base import incremental_text

CODE = "def grow(x1):\n    return x1 + 23.5  # not\n"


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    with drafting.small_programs():
        yield


def logits_after(model, tokens):
    """Returns the float64 logits [V] after some tokens, without a cache."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    logits, _ = forward(model.config, model.params, padded)
    return np.asarray(logits, np.float64)[0, len(tokens) - 1]


@pytest.mark.parametrize("shape", [None, (2, 4)])
def test_positions_match_the_oracle(shape):
    mesh = sharding.mesh(*shape) if shape else None
    target = numpy_spread_model(48)
    draft = numpy_nearby_model(target)
    prompt, tokens = [3, 9, 4, 4, 20], [7, 1, 30, 2]
    on_mesh = (build_model(model.config, model.params, mesh) for model in (target, draft))
    figures = acceptance_analysis.positions(*on_mesh, prompt, tokens, SamplingParams(0.7))
    for index in range(len(tokens)):
        before = prompt + tokens[:index]
        p, q = logits_after(target, before), logits_after(draft, before)
        acceptance = np.minimum(softmax(p / 0.7), softmax(q / 0.7)).sum()
        assert figures.acceptance[index] == pytest.approx(acceptance, abs=1e-5)
        probs = softmax(p)
        assert figures.entropy[index] == pytest.approx(-(probs * np.log(probs)).sum(), abs=1e-4)
        first, second = np.sort(p)[:-3:-1]
        assert figures.margin[index] == pytest.approx(first - second, abs=1e-4)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_positions_of_smaller_draft_vocabulary_pads_it():
    target, draft = numpy_spread_model(48), numpy_spread_model(32, seed=1)
    figures = acceptance_analysis.positions(target, draft, [3], [4, 5], SamplingParams())
    p, q = softmax(logits_after(target, [3])), softmax(logits_after(draft, [3]))
    assert figures.acceptance[0] == pytest.approx(np.minimum(p[:32], q).sum(), abs=1e-5)


@pytest.mark.parametrize("code", [True, False])
def test_token_classes_follow_words(tmp_path, code):
    """A token has the class of the word that its first visible character is part of."""
    texts = [CODE * 9, "import os\n" * 9, "yield self\n" * 9]
    tokenizer = tokenization.train(texts, tmp_path / "tokenizer.model", 310)
    prompt = tokenizer.encode("import os\n")
    tokens = tokenizer.encode(CODE, whole=False)
    classes = acceptance_analysis.token_classes(tokenizer, prompt, tokens, code)
    assert len(classes) == len(tokens)
    text, by_character = "", []
    for count in range(1, len(tokens) + 1):
        grown = incremental_text(tokenizer, prompt, tokens[:count])
        by_character += [classes[count - 1]] * (len(grown) - len(text))
        text = grown
    assert text == CODE
    words = {"def": "keyword" if code else "name", "grow": "name", "x1": "name", "23.5": "number"}
    words |= {"return": words["def"], "not": words["def"], "+": "punctuation"}
    for word, kind in words.items():
        start = CODE.index(word)
        assert set(by_character[start : start + len(word)]) <= {kind}, word
    # A token of white space alone has the class of indents.
    spaces = [kind for kind, id in zip(classes, tokens) if not tokenizer.decode([id]).strip()]
    assert spaces and set(spaces) == {"indent"}


def test_shares_add_up():
    share = acceptance_analysis.Share
    by_class = acceptance_analysis.shares(["a", "b", "a", "a"], [1.0, 0.5, 0.0, 0.5])
    assert by_class == {"a": share(0.75, 0.5), "b": share(0.25, 0.5)}
    classes = list(map(acceptance_analysis.entropy_class, (0.0, 0.1, 0.7, 2.99, 3.0, 9.0)))
    assert classes == ["0-0.1", "0.1-0.5", "0.5-1.0", "2.0-3.0", "3.0+", "3.0+"]


def test_divergence_is_the_first_difference():
    """Equal texts do not diverge; others do at their first difference, or where one ends."""
    target, prompt = numpy_spread_model(48), [3, 9, 4]
    sampling = SamplingParams(temperature=0.0)
    out = generation.generate(target, [prompt], None, None, sampling, 8, stop_at_eos=False)
    text = out.tokens[0].tolist()
    assert acceptance_analysis.divergence(target, prompt, text, text) is None
    other = [*text[:5], (text[5] + 1) % 48, 1, 2]
    divergence = acceptance_analysis.divergence(target, prompt, text, other)
    logits = np.sort(logits_after(target, prompt + text[:5]))
    assert divergence.position == 5
    assert divergence.margin == pytest.approx(logits[-1] - logits[-2], abs=1e-4)
    shorter = acceptance_analysis.divergence(target, prompt, text[:3], text)
    assert shorter.position == 3 and dataclasses.asdict(shorter)["margin"] > 0
