"""Tests of error messages: a bad argument gets one line with what was expected and found."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.bad_input import one_line, refused
from helpers.calls import Call
from helpers.models import build_model, tiny_config
from helpers.numpy_models import numpy_spread_model

import spsjax
from spsjax import SamplingParams, errors, tokenization
from spsjax.drafters import ngram
from spsjax.parallel import sharding
from spsjax.verifiers import rejection

NAN = float("nan")


@pytest.fixture(scope="module")
def model():
    """A model with a context of 64 and no tokenizer."""
    return numpy_spread_model(64, max_positions=64)


def accepted(model, drafter, max_new_tokens):
    """Makes a request of `generate`, which checks all arguments and compiles nothing."""
    return Call(model, [[1, 2]], drafter, max_new_tokens=max_new_tokens)


def test_message_of_another_error_is_printable():
    """A terminal must not obey a control character of a file that a message quotes."""
    assert errors.one_line(ValueError("a\n\x1b[2J\ud800\u202eé")) == r"a \x1b[2J\ud800\u202eé"
    assert errors.one_line(OSError()) == "OSError"


@pytest.mark.parametrize("model", [None, "pystdlib/target", 3])
def test_model_that_is_not_loaded_is_refused(model):
    refused(model, "model", type(model).__name__)


@pytest.mark.parametrize("eos_ids", [(64,), (2, -1), (True,), (None,), (2.0,), 3, "3", None])
def test_end_of_sequence_ids_out_of_range_are_refused(eos_ids):
    with one_line("eos_ids: expected", repr(eos_ids[-1] if type(eos_ids) is tuple else eos_ids)):
        tiny_config(64, eos_ids=eos_ids)


def named(argument, values, fragment, **others):
    """Yields arguments of `generate`, and what a refusal says: the argument and the fragment."""
    for value in values:
        yield {argument: value} | others, (argument, fragment(value))


def in_prompts(values, *fragments):
    """Yields prompts of which the second is wrong, and what a refusal says."""
    for value in values:
        yield {"prompts": [[1], value]}, ("prompts[1]", *(of(value) for of in fragments))


def type_name(value) -> str:
    return type(value).__name__


REFUSED = [
    *named("prompts", ("text", None, 3, {1: [2]}, {(1, 2)}, iter([[1]])), type_name),
    *named("prompts", ([],), lambda _: "expected"),
    *named("prompts", ([[]], [[1], []], [""], [[1], ""]), lambda rows: f"[{len(rows) - 1}]"),
    *in_prompts((None, 3, b"text", [1.0], [True], [1, True], [1, None], [[1]], ["1"]), type_name),
    *in_prompts(({1, 2}, np.ones((2, 2))), type_name),
    *in_prompts(([0, -1], [0, 64], [0, 2**40]), lambda prompt: f"[0, 64), found {prompt[1]}"),
    *named("max_new_tokens", (-1, 1.5, "3", None, [], True, [2, -1]), repr),
    *named("max_new_tokens", ([1, 2], [[1]]), lambda _: "one per row"),
    *named("sampling", ({}, None, "greedy", 1.0), type_name),
    *named("verifier", (1.0, rejection), type_name),
    *named("stop_at_eos", ("no", 1, None, np.array([True, False])), lambda _: "expected True or F"),
    *named("drafter", ("ngram", 3, ngram), type_name),
    *named("num_speculative_tokens", (-1, 1.5, "2"), repr, drafter=ngram.Drafter()),
    *named("slots", (0, 1.5, "64", True), repr),
    *named("slots", (31,), lambda _: "slots: expected at least 35,", max_new_tokens=32),
]


@pytest.mark.parametrize(("arguments", "fragments"), REFUSED)
def test_argument_of_generate_is_refused_by_its_name(model, arguments, fragments):
    """Of another type, out of its range, or of another number of rows."""
    refused(model, *fragments, **arguments)


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p"])
def test_sampling_values_not_one_per_row_are_refused(model, field):
    refused(model, field, "one per row", "3", sampling=SamplingParams(**{field: [1, 1, 1]}))


def test_text_for_model_without_tokenizer_is_refused(model):
    refused(model, "prompts[0]", "tokenizer", prompts=["text"])
    with one_line("tokenizer"):
        spsjax.stream(model, "text")


@pytest.mark.parametrize(("length", "budget"), [(65, 0), (63, 2), (1, 64), (1, 10**12)])
def test_more_tokens_than_the_context_are_refused(model, length, budget):
    prompts = [[1], [1] * length]
    refused(
        model, "prompts[1]", "64", f"{length} + {budget}", prompts=prompts,
        max_new_tokens=[1, budget],
    )  # fmt: skip


def test_more_tokens_than_the_draft_context_are_refused(model):
    short = numpy_spread_model(64, max_positions=32)
    refused(model, "prompts[0]", "32", "2 + 31", drafter=short, max_new_tokens=31)
    accepted(model, drafter=short, max_new_tokens=30)


def test_generate_can_fill_the_context(model):
    with drafting.small_programs():
        assert len(spsjax.generate(model, [[1] * 60], max_new_tokens=4).tokens[0]) == 4


# Sampling.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-1, NAN, float("inf"), "x", None, [1, None], {})],
        *[("top_p", value) for value in (0, -0.1, 1.1, NAN, "x", None, [0.5, 0])],
        *[("top_k", value) for value in (-1, 1.5, NAN, None, [3, -1])],
        *[("min_p", value) for value in (-0.1, 1.1, NAN, None, [0.1, 2], [[0.1]])],
    ],
)
def test_sampling_value_out_of_range_is_refused(field, value):
    with one_line(field, repr(value)):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("lenience", [0, -1, 1.1, NAN, 1e-39])
def test_lenience_out_of_range_is_refused(model, lenience):
    with one_line("lenience", "(0, 1]", repr(lenience)):
        rejection.Verifier(lenience)
    with one_line("lenience", "(0, 1]"):
        spsjax.lenience_bias(np.ones((1, 2)) / 2, np.ones((1, 2)) / 2, lenience)


# Drafters.


@pytest.mark.parametrize("value", ["no", 1])
def test_replicate_that_is_not_a_bool_is_refused(model, value):
    with one_line("replicate: expected True or False"):
        spsjax.load("pystdlib/draft", replicate=value)
    for name in ("pystdlib/draft", "ngram"):  # None leaves it to the drafter
        with one_line("replicate: expected True or False"):
            spsjax.load_drafter(name, model, replicate=value)


def test_stream_and_propose_name_their_prompt(tmp_path, model):
    path = tmp_path / "tokenizer.model"
    tokenizer = tokenization.train(["def f(x):\n    return x\n"], path, 285)
    both = "prompt, max_new_tokens"  # an empty text is one token, and too much with 128 more
    for prompt, one, other in (
        ("", "prompt", both),
        ([], "prompt", "prompt"),
        ([64], "prompt", "prompt"),
        ([1] * 65, both, both),
    ):
        with one_line(f"{one}: expected"):
            spsjax.propose(model, prompt, ngram.Drafter())
        with one_line(f"{other}: expected"):
            spsjax.stream(dataclasses.replace(model, tokenizer=tokenizer), prompt)


def test_class_instead_of_an_instance_is_refused(model):
    refused(model, "drafter", "found the class Drafter. Make an instance", drafter=ngram.Drafter)
    inside = spsjax.LoadedDrafter("x", ngram.Drafter, {})
    refused(model, "drafter x", "found the class Drafter. Make an instance", drafter=inside)
    refused(model, "verifier", "found the class Verifier.", verifier=rejection.Verifier)


def test_drafter_that_is_not_hashable_is_refused(model):
    """A drafter that is not a frozen dataclass cannot be compiled into a program."""

    class Plain(ngram.Drafter.__mro__[1]):
        num_speculative_tokens = 2
        init = propose = commit = None

    refused(model, "drafter", "frozen dataclass", "Plain", drafter=Plain())
    refused(model, "drafter", "Open", drafter=dataclasses.dataclass(type("Open", (Plain,), {}))())


def test_unknown_drafter_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such"):
        spsjax.drafters.no_such  # noqa: B018


@pytest.mark.parametrize(
    "changes", [{"max_ngram": 0}, {"min_ngram": 0}, {"min_ngram": 4}, {"max_ngram": True}]
)
def test_ngram_lengths_that_match_nothing_are_refused(changes):
    with one_line("min_ngram", "max_ngram"):
        ngram.Drafter(**changes)


def test_draft_of_another_vocabulary_is_refused(model):
    refused(model, "drafter", "64", "32", drafter=numpy_spread_model(32, max_positions=64))


def test_draft_with_another_tokenizer_is_refused(tmp_path, model):
    """A draft with another tokenizer is refused, and one with an equal tokenizer is accepted."""
    texts = {"target": "def f(x):\n    return x\n", "draft": "once upon a time there was a fox\n"}
    target, draft = (
        spsjax.Model(
            name, model.config, model.params, tokenization.train([text], tmp_path / name, 285)
        )
        for name, text in texts.items()
    )
    refused(target, "draft", "texts of all ids that both have, found id 2", drafter=draft)
    again = tokenization.load(tmp_path / "target")
    same = spsjax.Model("same", model.config, model.params, again)
    accepted(target, drafter=same, max_new_tokens=2)


def test_draft_on_another_mesh_is_refused(model):
    target = build_model(model.config, model.params, sharding.mesh(1, 8))
    refused(target, "mesh", drafter=model)


# Arguments of `rejection_sample`.


def test_distributions_of_wrong_shape_are_refused():
    """Arguments of `rejection_sample` whose shapes or types do not fit are refused by name."""
    key, tokens = jax.random.key(0), np.zeros((2, 3), int)
    draft, target = np.ones((2, 3, 5)) / 5, np.ones((2, 4, 5)) / 5
    with one_line("target_probs", "[2, 4, 5]", "[2, 3, 5]"):
        spsjax.rejection_sample(key, tokens, draft, target[:, :3])
    with one_line("draft_probs", "[2, 3, 5]", "[2, 2, 5]"):
        spsjax.rejection_sample(key, tokens, draft[:, :2], target)
    with one_line("draft_tokens", "[B, K]", "[3]"):
        spsjax.rejection_sample(key, tokens[0], draft, target)
    with one_line("draft_tokens", "integers", "float32"):
        spsjax.rejection_sample(key, tokens.astype(np.float32), draft, target)
    with one_line("lenience", "(0, 1]", "2"):
        spsjax.rejection_sample(key, tokens, draft, target, lenience=2)
    with one_line("draft_tokens", "B >= 1", "[0, 3]"):
        spsjax.rejection_sample(key, tokens[:0], draft[:0], target[:0])
    with one_line("target_probs", "[2, 4, 0]"):
        spsjax.rejection_sample(key, tokens, draft[..., :0], target[..., :0])
    for ragged in ([[0, 1], [1]], None, "text"):
        for index, name in enumerate(("draft_tokens", "draft_probs", "target_probs")):
            arrays = [tokens, draft, target]
            arrays[index] = ragged
            with one_line(name):
                spsjax.rejection_sample(key, *arrays)


def test_values_that_are_not_distributions_are_refused():
    key, tokens = jax.random.key(0), np.zeros((2, 3), int)
    draft, target = np.ones((2, 3, 5)) / 5, np.ones((2, 4, 5)) / 5
    with one_line("draft_tokens", "[-1, 5)", str(2**32)):  # int32 would make it 0
        spsjax.rejection_sample(key, tokens + 2**32, draft, target)
    for wrong in (0 * target, -target, 3 * target, np.log(target)):
        with one_line("target_probs", "sum to 1", "at [0, 0]"):
            spsjax.rejection_sample(key, tokens, draft, wrong)
        with one_line("draft_probs", "sum to 1", "at [1, 0]"):
            spsjax.rejection_sample(key, tokens, np.stack([draft[0], wrong[1, :3]]), target)
        with one_line("target_probs", "sum to 1"):
            spsjax.lenience_bias(wrong, wrong, 0.5)
    with one_line("draft_probs", "[5]", "[4]"):
        spsjax.lenience_bias(np.ones(4) / 4, np.ones(5) / 5, 0.5)
    # Without draft tokens, the draft's probabilities need not be a distribution.
    assert spsjax.rejection_sample(key, tokens - 1, 0 * draft, target)[1].tolist() == [1, 1]


@pytest.mark.parametrize(
    "key", [0, None, np.zeros(3, np.uint32), jax.random.split(jax.random.key(0)), np.zeros((2, 2))]
)
def test_value_that_is_not_a_key_is_refused(key):
    tokens, draft, target = np.zeros((1, 1), int), np.ones((1, 1, 2)) / 2, np.ones((1, 2, 2)) / 2
    with one_line("key", "jax.random.key"):
        spsjax.rejection_sample(key, tokens, draft, target)
    spsjax.rejection_sample(jax.random.PRNGKey(0), tokens, draft, target)  # a key of the old style


def test_long_value_is_abbreviated_in_the_message(model):
    with one_line("temperature"):
        SamplingParams(temperature=[-1.0] * 10_000)
    refused(model, "max_new_tokens", max_new_tokens=np.full((100, 100), -1))
    with one_line("expected a model folder"):
        spsjax.load("x" * 10_000)
