"""Acceptance token by token, against the oracle's laws; classes; where greedy texts part."""

import dataclasses

import numpy as np
import pytest
from conftest import logits_of, nearby_model, spread_model

from spsjax import SamplingParams, generation, tokenization
from spsjax.evaluation import acceptance_analysis
from spsjax.parallel import sharding

CODE = "def grow(x1):\n    return x1 + 23.5  # not\n"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return tokenization.train([CODE * 9, "import os\n" * 9, "yield self\n" * 9], path, 310)


@pytest.mark.parametrize("data, model", [(1, 1), (2, 4)])
def test_positions_are_what_the_laws_say(data, model):
    mesh = None if data == 1 else sharding.mesh(data, model)
    target = spread_model(48, mesh=mesh)
    draft = nearby_model(target, mesh=mesh)
    prompt, tokens = [3, 9, 4, 4, 20], [7, 1, 30, 2]
    found = acceptance_analysis.positions(
        target, draft, prompt, tokens, SamplingParams(temperature=0.7)
    )
    of_target, of_draft = logits_of(target), logits_of(draft)
    for place in range(len(tokens)):
        before = prompt + tokens[:place]
        one, other = of_target(before), of_draft(before)
        acceptance = np.minimum(law(one / 0.7), law(other / 0.7)).sum()
        assert found.acceptance[place] == pytest.approx(acceptance, abs=1e-5)
        itself = law(one)
        assert found.entropy[place] == pytest.approx(-(itself * np.log(itself)).sum(), abs=1e-4)
        first, second = np.sort(one)[:-3:-1]
        assert found.margin[place] == pytest.approx(first - second, abs=1e-4)


def law(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_a_draft_of_fewer_ids_gives_the_others_nothing():
    target, draft = spread_model(48), spread_model(32, seed=1)
    found = acceptance_analysis.positions(target, draft, [3], [4, 5], SamplingParams())
    one, other = law(logits_of(target)([3])), law(logits_of(draft)([3]))
    assert found.acceptance[0] == pytest.approx(np.minimum(one[:32], other).sum(), abs=1e-5)


@pytest.mark.parametrize("code", [True, False])
def test_a_token_is_of_the_class_of_its_word(pieces, code):
    prompt = pieces.encode("import os\n")
    tokens = pieces.encode(CODE, whole=False)
    found = acceptance_analysis.classes(pieces, prompt, tokens, code)
    assert len(found) == len(tokens)
    text, by_character = "", []
    for count in range(1, len(tokens) + 1):
        grown = generation.continuation(pieces, prompt, tokens[:count])
        by_character += [found[count - 1]] * (len(grown) - len(text))
        text = grown
    assert text == CODE
    words = {"def": "keyword" if code else "name", "grow": "name", "x1": "name", "23.5": "number"}
    words |= {"return": words["def"], "not": words["def"], "+": "punctuation"}
    for word, kind in words.items():
        place = CODE.index(word)
        assert set(by_character[place : place + len(word)]) <= {kind}, word
    # A token of white space alone is none of these.
    spaces = [kind for kind, id in zip(found, tokens) if not pieces.decode([id]).strip()]
    assert spaces and set(spaces) == {"indent"}


def test_shares_add_up():
    found = acceptance_analysis.shares(["a", "b", "a", "a"], [1.0, 0.5, 0.0, 0.5])
    assert found == {
        "a": acceptance_analysis.Share(0.75, 0.5),
        "b": acceptance_analysis.Share(0.25, 0.5),
    }
    classes = [
        acceptance_analysis.entropy_class(value) for value in (0.0, 0.1, 0.7, 2.99, 3.0, 9.0)
    ]
    assert classes == ["0-0.1", "0.1-0.5", "0.5-1.0", "2.0-3.0", "3.0+", "3.0+"]


def test_texts_part_where_they_differ():
    target = spread_model(48)
    greedy = SamplingParams(temperature=0.0)
    prompt = [3, 9, 4]
    text = generation.generate(target, [prompt], None, None, greedy, 8, stop_at_eos=False)
    text = text.tokens[0].tolist()
    assert acceptance_analysis.parting(target, prompt, text, text) is None
    other = [*text[:5], (text[5] + 1) % 48, 1, 2]
    parted = acceptance_analysis.parting(target, prompt, text, other)
    logits = np.sort(logits_of(target)(prompt + text[:5]))
    assert parted.place == 5
    assert parted.margin == pytest.approx(logits[-1] - logits[-2], abs=1e-4)
    shorter = acceptance_analysis.parting(target, prompt, text[:3], text)
    assert shorter.place == 3 and dataclasses.asdict(shorter)["margin"] > 0
