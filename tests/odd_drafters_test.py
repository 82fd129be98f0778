"""Drafters that the loop cannot take as they are: cut to what it takes, or refused in one line."""

import dataclasses

import drafting
import jax.numpy as jnp
import numpy as np
import pytest
import toy_drafters
from core_test import PROMPTS

import spsjax
from spsjax import InputError, SamplingParams
from spsjax.drafters import ngram
from spsjax.loading import LoadedDrafter
from spsjax.verifiers import match


@dataclasses.dataclass(frozen=True)
class WithList(ngram.Drafter):
    items: list | None = None


def test_tree_deeper_than_k_is_cut_at_k(target, draft):
    """Nodes below depth K are never accepted, so that greedy output stays the target's."""
    loaded = drafting.build("random_tree", draft, 3)

    @dataclasses.dataclass(frozen=True)
    class Deep(type(loaded.drafter)):
        def propose(self, *args):
            deeper = toy_drafters.RandomTree(self.config, 3, self.num_nodes)
            return deeper.propose(*args)

    deep = dataclasses.replace(loaded, drafter=Deep(draft.config, 1, 6))
    options = {"sampling": SamplingParams(temperature=0.0), "max_new_tokens": 60}
    out = spsjax.generate(target, PROMPTS, deep, verifier=match.Verifier(), **options)
    expected = spsjax.generate(target, PROMPTS, **options)
    for tokens, others in zip(out.tokens, expected.tokens):
        np.testing.assert_array_equal(tokens, others)


def test_chain_token_that_is_not_eligible_ends_the_proposal(target, draft):
    """Rejection sampling and matching accept nothing at or after it, and it does not count."""
    loaded = drafting.build("draft_model", draft, 3)

    @dataclasses.dataclass(frozen=True)
    class Partly(type(loaded.drafter)):
        def propose(self, *args):
            proposal, state = super().propose(*args)
            eligible = jnp.arange(3) < jnp.ones_like(proposal.tokens)
            return dataclasses.replace(proposal, eligible=eligible), state

    fields = {f.name: getattr(loaded.drafter, f.name) for f in dataclasses.fields(loaded.drafter)}
    partly = dataclasses.replace(loaded, drafter=Partly(**fields))
    expected = spsjax.generate(target, PROMPTS, sampling=SamplingParams(0.0), max_new_tokens=12)
    for verifier in (None, match.Verifier()):
        options = {"sampling": SamplingParams(0.0), "max_new_tokens": 12, "verifier": verifier}
        out = spsjax.generate(target, PROMPTS, partly, **options)
        for tokens, others in zip(out.tokens, expected.tokens):
            np.testing.assert_array_equal(tokens, others)
        assert 0 < out.stats.acceptance_rate <= 1
        assert not any(out.stats.accepted_histogram[2:])


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


def test_drafter_without_its_weights_is_refused(target):
    drafter = toy_drafters.Tapped(32, 48)
    with pytest.raises(InputError, match="found a drafter without its weights"):
        spsjax.generate(target, PROMPTS, drafter, max_new_tokens=4)
