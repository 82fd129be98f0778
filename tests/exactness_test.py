"""The joint law of what the loop emits is the target's to 1e-12: every draft path, every verdict.

`enumeration.Loop` runs spsjax's own step in float64; `reference` holds the target's law. That the
check can fail is checked too: it refuses every verifier of `mutants`, and accepts their sound one.
"""

import dataclasses

import enumeration
import jax
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
import reference

from spsjax import decode, sampling, verify
from spsjax.drafters import draft_model, ngram, none
from spsjax.types import Proposal

VOCAB, END = 3, 2
TOLERANCE = 1e-12
PARAMS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.7, "top_p": 0.7003},
    {"min_p": 0.3007},
    {"temperature": 1.5, "top_k": 2, "top_p": 0.9003, "min_p": 0.2503},
)
# (K, new tokens, ends of sequence). A limit below and above K + 1, and no multiple of it, so that
# blocks are cut off everywhere; without an end of sequence, and with one.
SHAPES = ((1, 3, (END,)), (2, 4, (END,)), (2, 3, ()), (3, 2, (END,)))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def drafters(K):
    return {
        "draft_model": draft_model.Drafter(enumeration.config(VOCAB), K),
        "ngram": ngram.Drafter(K, max_ngram=2),
        "none": none.Drafter(),
    }


def loop(drafter="draft_model", K=2, new=3, eos_ids=(END,), seed=0, prompt=(0,), **options):
    length = len(prompt) + new + K
    return enumeration.Loop(
        drafters(K)[drafter],
        enumeration.table(VOCAB, length, seed),
        enumeration.table(VOCAB, length, seed + 1),
        len(prompt) + new,
        eos_ids,
        prompt,
        **options,
    )


def target_law(loop, **params):
    model = enumeration.model_of(loop.target)
    return reference.joint_law(model, loop.prompt, loop.limit, loop.eos_ids, **params)


def assert_lossless(loop, **params):
    law = loop.law(**params)
    assert abs(sum(law.values()) - 1) < TOLERANCE
    assert enumeration.distance(law, target_law(loop, **params)) < TOLERANCE, params


@pytest.mark.parametrize(("K", "new", "eos_ids"), SHAPES)
def test_draft_model_is_lossless(K, new, eos_ids):
    studied = loop("draft_model", K, new, eos_ids, seed=K)
    for params in PARAMS if (K, new) != (2, 4) else PARAMS[::5]:
        assert_lossless(studied, **params)


@pytest.mark.parametrize(("K", "new", "eos_ids"), SHAPES[1:])
def test_ngram_is_lossless(K, new, eos_ids):
    # The prompt repeats itself, so that most contexts have a match, and some have none.
    studied = loop("ngram", K, new, eos_ids, seed=K, prompt=(0, 1, 0))
    for params in PARAMS:
        assert_lossless(studied, **params)


def test_no_drafter_is_algorithm_1():
    studied = loop("none", 0, 4)
    for params in PARAMS:
        assert_lossless(studied, **params)


def test_a_draft_in_another_vocabulary_region_is_lossless():
    """Supports that hardly meet: after the filters, ratios of zero and residuals of everything."""
    studied = loop("draft_model", 2, 3)
    studied = dataclasses.replace(studied, draft=-3 * studied.target[:])
    for params in ({"top_k": 1}, {"top_k": 2}, {"temperature": 0.5, "top_p": 0.6003}):
        assert_lossless(studied, **params)


def test_a_draft_that_is_the_target_is_lossless():
    """Every residual is empty, up to rounding."""
    studied = loop("draft_model", 2, 3)
    studied = dataclasses.replace(studied, draft=studied.target[:])
    for params in (PARAMS[0], PARAMS[5]):
        assert_lossless(studied, **params)


@pytest.mark.parametrize("lenience", (0.3, 0.8))
@pytest.mark.parametrize("drafter", ("draft_model", "ngram"))
def test_lenient_law_is_the_law_with_lenience(drafter, lenience):
    studied = loop(drafter, K=1, new=1, eos_ids=(), lenience=lenience, prompt=(0, 1, 0))
    for params in (PARAMS[0], PARAMS[5]):
        law = studied.law(**params)
        target_probs, draft_probs = (
            reference.warp(enumeration.model_of(table)(studied.prompt), **params)
            for table in (studied.target, studied.draft)
        )
        if drafter == "ngram":
            draft_probs = np.eye(VOCAB)[1]  # what followed the 0 before
        emitted = np.asarray([law[(token,)] for token in range(VOCAB)])
        expected = verify.lenient_law(draft_probs, target_probs, lenience)
        np.testing.assert_allclose(emitted, expected, atol=TOLERANCE)
        bias = verify.lenience_bias(draft_probs, target_probs, lenience)
        np.testing.assert_allclose(np.abs(emitted - target_probs).sum() / 2, bias, atol=TOLERANCE)
        assert verify.lenience_bias(draft_probs, target_probs, 1.0) < TOLERANCE


def test_lenience_biases_what_it_should():
    """The check above is no tautology: lenience is seen by the test of losslessness."""
    studied = loop(K=1, new=2, lenience=0.5, quick_to_compile=True)
    assert enumeration.distance(studied.law(), target_law(studied)) > 1e-3


def rejected(studied, **params) -> bool:
    """Whether enumeration finds fault, be it in an invariant or in the law."""
    try:
        law = studied.law(**params)
    except AssertionError:
        return True
    return not enumeration.distance(law, target_law(studied, **params)) < TOLERANCE


def test_the_sound_verifier_of_the_mutants_passes(monkeypatch):
    monkeypatch.setattr(verify, "rejection", mutants.verifier(None))
    assert not rejected(loop(quick_to_compile=True))


@pytest.mark.parametrize("fault", mutants.LAW)
def test_broken_verifier_is_rejected(monkeypatch, fault):
    monkeypatch.setattr(verify, "rejection", mutants.verifier(fault))
    assert rejected(loop(quick_to_compile=True))


@pytest.mark.parametrize("part", ("ratio", "residual", "warp of the draft", "commit"))
def test_broken_part_of_the_loop_is_rejected(monkeypatch, part):
    """The same in spsjax's own loop: each of its parts is really under test."""
    if part == "ratio":
        ratio = verify.ratio
        monkeypatch.setattr(
            verify, "ratio", lambda *args: (ratio(*args)[0] + 1e-9, ratio(*args)[1])
        )
    elif part == "residual":
        monkeypatch.setattr(verify, "residual", lambda draft, target, lenience: target)
    elif part == "warp of the draft":
        propose = draft_model.Drafter.propose

        def unwarped(self, params, state, tokens, lengths, rows, keys):
            proposal, state = propose(self, params, state, tokens, lengths, rows, keys)
            return Proposal(proposal.tokens, proposal.probs**0.9), state

        monkeypatch.setattr(draft_model.Drafter, "propose", unwarped)
    else:
        step = decode.step

        def forgets(program, params, rows, state):
            after = step(program, params, rows, state)
            return dataclasses.replace(after, cache=after.cache.at(after.lengths))

        monkeypatch.setattr(decode, "step", forgets)
    assert rejected(loop(quick_to_compile=True))


@pytest.mark.parametrize("fault", (None, "u = 0 accepts anything"))
def test_u_of_zero_never_accepts_a_token_of_no_probability(monkeypatch, fault):
    rejection = verify.rejection if fault is None else mutants.verifier(fault)
    monkeypatch.setattr(sampling, "uniforms", lambda keys, role, count: jnp.zeros((1, count)))
    proposal = Proposal(jnp.asarray([[1, 0]]), jnp.asarray([[[0.5, 0.5], [0.5, 0.5]]]))
    target_probs = jnp.asarray([[[1.0, 0.0]] * 3])
    verdict = rejection(jax.random.split(jax.random.key(0), 1), proposal, target_probs)
    accepts = int(verdict.num_tokens[0]) > 1
    assert accepts == (fault is not None)
