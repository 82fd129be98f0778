"""Drafters that the loop cannot take as they are: cut to what it takes, or refused in one line."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting, toy_drafters
from helpers.bad_input import one_line, refused
from helpers.calls import assert_same_texts
from helpers.models import PROMPTS
from helpers.numpy_models import numpy_spread_model
from ml_collections import ConfigDict

import spsjax
from spsjax import InputError, SamplingParams
from spsjax.cli import configs
from spsjax.drafters import base, draft_model, ngram, none
from spsjax.loading import LoadedDrafter
from spsjax.types import Proposal
from spsjax.verifiers import match


@pytest.fixture(scope="module")
def model():
    """A model with a context of 64 and no tokenizer."""
    return numpy_spread_model(64, max_positions=64)


@dataclasses.dataclass(frozen=True)
class WithList(ngram.Drafter):
    items: list | None = None


@dataclasses.dataclass(frozen=True)
class Star(base.Drafter):
    """One or two tokens after the root, which alone has a distribution."""

    vocab: int = 48
    num_speculative_tokens: int = 1
    score_sizes: tuple = (1, 3)

    def propose(self, params, state, now):
        B, long = len(now.lengths), now.lengths[:, None] > 12
        tokens = jnp.where(long, jnp.asarray([[3, 4, -1]]), jnp.asarray([[3, -1, -1]]))
        probs = jnp.full((B, 1, self.vocab), 1 / self.vocab)
        return Proposal(tokens, probs, jnp.zeros((B, 3), jnp.int32))


@pytest.mark.slow
def test_tree_whose_leaves_have_no_distribution_is_scored_in_smaller_passes(target):
    options = {"sampling": SamplingParams(temperature=0.0), "max_new_tokens": 20}
    out = spsjax.generate(target, PROMPTS, Star(), verifier=match.Verifier(), **options)
    expected = spsjax.generate(target, PROMPTS, **options)
    assert_same_texts(out.tokens, expected.tokens)


@pytest.mark.parametrize("name", ["copy", "draft_model", "hybrid", "lookahead", "ngram", "suffix"])
def test_auto_does_not_draft_with_a_drafter_of_no_tokens(target, draft, name):
    out = spsjax.generate(target, PROMPTS, drafting.build(name, draft, 0), "auto", max_new_tokens=4)
    assert out.stats.proposed_tokens == 0
    assert out.stats.target_calls == max(map(len, out.tokens))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (SamplingParams(), "drafter x: expected a drafter in it, found SamplingParams"),
        (WithList(items=[3]), "drafter: expected a frozen dataclass that can be hashed, as"),
    ],
)
def test_drafter_of_a_wrong_type_or_unhashable_is_refused(target, method, message):
    with pytest.raises(InputError, match=f"^{message}"):
        spsjax.generate(target, PROMPTS, LoadedDrafter("x", method, {}), max_new_tokens=4)


def proposing(**changes):
    """A drafter that copies no token, with other fields in its proposal."""

    @dataclasses.dataclass(frozen=True)
    class Odd(ngram.Drafter):
        num_speculative_tokens: int = 2

        def propose(self, *args):
            tokens = jnp.zeros((2, 2), jnp.int32)
            fields = {"tokens": tokens, "probs": None} | changes
            return fields.get("result", spsjax.Proposal(*list(fields.values())[:4]))

    return Odd()


@pytest.mark.parametrize(
    ("changes", "expected", "actual"),
    [
        ({"tokens": jnp.zeros((2, 2))}, "tokens of a proposal as integer [2, 2]", "float32 [2, 2]"),
        ({"tokens": jnp.zeros((2, 3), int)}, "tokens", "int32 [2, 3]"),
        ({"tokens": jnp.zeros((1, 2), int)}, "tokens", "int32 [1, 2]"),
        ({"tokens": jnp.zeros(2, int)}, "tokens", "int32 [2]"),
        ({"tokens": None}, "tokens", "NoneType"),
        ({"tokens": [[1, 2]] * 2}, "tokens", "list"),
        (
            {"probs": jnp.ones((2, 3, 64))},
            "probs of a proposal as floating [2, 2, 64]",
            "[2, 3, 64",
        ),
        ({"probs": jnp.ones((2, 64))}, "probs", "[2, 64]"),
        ({"probs": jnp.ones((2, 2, 64), int)}, "probs", "int32"),
        ({"parents": jnp.zeros((2, 3), int)}, "parents", "[2, 3]"),
        ({"parents": None, "eligible": jnp.ones((2, 2))}, "eligible", "float32"),
        ({"result": ()}, "propose to return a Proposal", "tuple"),
    ],
)
def test_proposal_of_wrong_shape_or_type_is_refused(model, changes, expected, actual):
    """The shapes are those of the drafter, of two rows and of 64 tokens; checked when traced."""
    drafter = proposing(**changes)
    refused(model, f"drafter: expected {expected}", actual, prompts=[[1], [2]], drafter=drafter)


def test_drafter_without_its_weights_is_refused(target):
    drafter = toy_drafters.Tapped(32, 48)
    with pytest.raises(InputError, match="found a drafter without its weights"):
        spsjax.generate(target, PROMPTS, drafter, max_new_tokens=4)


def test_number_of_drafts_without_drafting_is_ignored(target):
    """One K can serve a sweep over drafters."""
    expected = spsjax.generate(target, PROMPTS, max_new_tokens=4)
    for drafter in (None, none.Drafter(), spsjax.load_drafter("none", target)):
        out = spsjax.generate(target, PROMPTS, drafter, 4, max_new_tokens=4)
        assert all(map(np.array_equal, out.tokens, expected.tokens))
    refused(target, "num_speculative_tokens", "-1", num_speculative_tokens=-1)


def test_propose_without_drafter_is_refused(model):
    with one_line("drafter: expected a loaded model or a drafter, found None"):
        spsjax.propose(model, [1, 2], None)


def test_drafter_name_gets_a_hint(model):
    for name in ("n-gram", "N_gram"):
        with one_line("expected 'ngram' or a model", repr(name)):
            spsjax.load_drafter(name, model)
    names = "copy, early_exit, lookahead, ngram, none, sparse_self, "
    with one_line(f"expected model, {names}", "'n-gram'"):
        configs.load_drafter("n-gram", "", ConfigDict(), None)


def test_weights_of_another_shape_are_refused(model):
    """A drafter or a model whose weights are not those of its config."""
    method = draft_model.Drafter(model.config)
    wrong = model.params | {"norm": {"scale": jnp.ones(3)}}
    more = model.params | {"head": jnp.ones(3)}
    for params, part in (
        (wrong, "['norm']['scale']"),
        (more, "head"),
        ({"x": jnp.ones(3)}, "embed"),
    ):
        drafter = spsjax.LoadedDrafter("x", method, params)
        refused(model, "drafter x: expected weights of its config", part, drafter=drafter)
    bad = dataclasses.replace(model, params=wrong)
    refused(bad, "model", "['norm']['scale']: [32], found [3]")
    tapped = toy_drafters.Tapped(32, 48)
    drafter = spsjax.LoadedDrafter("x", tapped, {"x": jnp.ones(3)})
    refused(model, "drafter x: expected weights of its config", drafter=drafter)


@pytest.mark.parametrize("sizes", [(-1,), 3, ("1",), (True,), [1], (), (3, 2)])
def test_score_sizes_that_are_not_counts_are_refused(model, sizes):
    @dataclasses.dataclass(frozen=True)
    class Sized(ngram.Drafter):
        score_sizes = sizes

    refused(model, "score_sizes", repr(sizes), drafter=Sized())


def test_drafter_name_that_is_an_array_is_refused(model):
    with one_line("name: expected a text or a path", "ndarray"):
        spsjax.load_drafter(np.array(["ngram", "none"]), model)
