"""Tests of the warning that a trained drafter is hardly ever right."""

import warnings

import pytest
from helpers import drafting
from helpers.calls import Call
from helpers.models import nearby_model

import spsjax
from spsjax import SamplingParams
from spsjax.runtime import low_acceptance

PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
GREEDY = SamplingParams(temperature=0.0)
TEXTS = {"sampling": GREEDY, "max_new_tokens": 20, "stop_at_eos": False}


@pytest.fixture(autouse=True)
def fewer_rounds(monkeypatch):
    monkeypatch.setattr(low_acceptance, "_ROUNDS", 40)
    monkeypatch.setattr(low_acceptance, "_COUNTS", {})
    with drafting.small_programs():
        yield


@pytest.fixture(scope="module")
def noise(draft):
    """A draft model that agrees with the target in one of twenty tokens, or fewer."""
    return nearby_model(draft, seed=9, distance=30.0)


def warnings_of(function) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(one.message) for one in caught if "accepted" in str(one.message)]


def test_drafts_that_are_right_by_chance_are_warned_of_once(target, noise):
    def generate():
        spsjax.generate(target, PROMPTS, noise, 3, **TEXTS)

    (message,), *others = (warnings_of(generate) for _ in range(3))
    assert others == [[], []] and message.startswith(f"drafter {noise.name}: in ")
    assert "rounds a draft token was accepted, about as often as by" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "proposed", "histogram", "warns"),
    [
        ("draft", 3 * 40, [39, 1, 0, 0], True),
        ("draft", 3 * 40, [38, 1, 1, 0], False),  # one round in twenty
        ("draft", 3 * 40, [400, 1, 1, 0], False),  # most rounds proposed nothing
        ("draft", 3 * 39, [39, 0, 0, 0], False),  # too few to tell
        ("ngram", 3 * 40, [40, 0, 0, 0], False),  # is not trained
    ],
)
def test_warning_counts_the_rounds_that_proposed(target, draft, name, proposed, histogram, warns):
    drafter = draft if name == "draft" else spsjax.load_drafter(name, target)
    call = Call(target, PROMPTS, drafter, 3, GREEDY, 20, 0, None, False)
    assert bool(warnings_of(lambda: low_acceptance.count(call.setup, proposed, histogram))) == warns


def test_rounds_of_all_calls_count(target, draft):
    call = Call(target, PROMPTS, draft, 3, GREEDY, 20, 0, None, False)
    counts = [
        len(warnings_of(lambda: low_acceptance.count(call.setup, 3 * 15, [15, 0, 0, 0])))
        for _ in range(5)
    ]
    assert counts == [0, 0, 1, 0, 0]


def test_engine_warns_once(target, noise):
    engine = spsjax.Engine(target, noise, 3, rows=2, slots=64, stop_at_eos=False)

    def serve():
        for _ in range(3):
            requests = [engine.submit(prompt, GREEDY, 30) for prompt in PROMPTS]
            for request in requests:
                request.result()

    assert len(warnings_of(serve)) == 1
