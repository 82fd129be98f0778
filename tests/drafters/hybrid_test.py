"""A look-up and a model in one drafter: who drafts, what runs, and that a rested model is whole.

That it is lossless is enumerated in `whole_texts_test`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.models import nearby_model, spread_model

import spsjax
from spsjax import InputError, SamplingParams, Tree, decode, sampling
from spsjax.drafters import base, copy, draft_model, hybrid, ngram, none, stopping, suffix
from spsjax.loading import LoadedDrafter
from spsjax.types import Proposal
from spsjax.verifiers import rejection

K = 4
GREEDY = SamplingParams(0.0)
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [1, 2, 1, 2, 1, 2], [9]]


@pytest.fixture(scope="module")
def target():
    return spread_model(48)


@pytest.fixture(scope="module")
def draft(target):
    return nearby_model(target)


@dataclasses.dataclass(frozen=True)
class Looks(base.Drafter):
    """Looks up token 7 in every place, and expects what it is told."""

    num_speculative_tokens: int = K
    expects: float = 0.0

    def propose(self, params, state, now):
        tokens = jnp.full((len(now.lengths), self.num_speculative_tokens), 7, jnp.int32)
        return Proposal(tokens, None, expected=jnp.full(len(now.lengths), self.expects)), ()


@dataclasses.dataclass(frozen=True)
class Watched(base.Drafter):
    """Drafts token 9, and counts how often it does."""

    num_speculative_tokens: int = K
    calls: list = dataclasses.field(default_factory=list, hash=False, compare=False)

    def propose(self, params, state, now):
        jax.debug.callback(lambda: self.calls.append(1))
        return Proposal(jnp.full((len(now.lengths), self.num_speculative_tokens), 9), None), ()


def steps(target, drafter, params, count, prompts=PROMPTS[:1], limit=60):
    """Yields program, parameters, and the state before each round."""
    program = decode.Program(target.config, drafter, rejection.Verifier())
    weights = {"target": target.params, "drafter": params}
    width = max(map(len, prompts))
    tokens = np.asarray([prompt + [0] * (width - len(prompt)) for prompt in prompts], np.int32)
    lengths = np.asarray(list(map(len, prompts)), np.int32)
    keys = sampling.row_keys(jax.random.key(0), len(prompts))
    rows, limits = GREEDY.rows(len(prompts)), np.full(len(prompts), limit, np.int32)
    state = decode.prefill(program, 96, weights, rows, tokens, lengths, limits, keys)
    step = jax.jit(lambda params, state: decode.step(program, params, state))
    for _ in range(count):
        yield program, weights, state
        state = step(weights, state)


def looks_up(state, depth=K) -> np.ndarray:
    """Returns which rows take what was looked up, if they are drafted so deep."""
    return np.asarray(hybrid.looks_up(state.drafter, np.full(len(state.lengths), depth)))


@pytest.mark.parametrize(("expects", "calls"), [(0.1, 7), (K + 1.0, 1)])
def test_model_does_not_run_while_all_rows_look_up(target, expects, calls):
    """In the first round nothing is looked up yet. Its average begins at half of K."""
    model = Watched()
    drafter = hybrid.Drafter(model, Looks(expects=expects))
    states = [state for _, _, state in steps(target, drafter, {}, 7)]
    jax.block_until_ready(states[-1])
    jax.effects_barrier()
    assert len(drafter.model.calls) == calls


@pytest.mark.parametrize("waits", (False, True))
def test_model_does_not_run_for_rows_that_are_done(target, waits):
    """One row looks up, and the other, which would not, is done."""
    model = Watched()
    drafter = hybrid.Drafter(model, Looks(), waits=waits)
    ((program, params, state),) = steps(target, drafter, {}, 1, PROMPTS[:2])
    own = dataclasses.replace(
        state.drafter,
        found=jnp.full((2, K), 7, jnp.int32),
        score=jnp.asarray([3.0, 0.0]),
        expected=jnp.ones(2),
    )
    jax.effects_barrier()
    for done, calls in ((False, 1), (True, 0)):
        drafter.model.calls.clear()
        now = dataclasses.replace(state, drafter=own, done=jnp.asarray([False, done]))
        proposal, _ = decode.propose(program, params, now, state.keys)
        jax.block_until_ready(proposal)
        jax.effects_barrier()
        assert proposal.tokens[0].tolist() == [7] * K
        assert len(drafter.model.calls) == calls


def test_score_counts_no_more_tokens_than_are_drafted(target):
    """Four tokens that are looked up are expected to give 3; of one, no more than 1 counts."""
    ((*_, state),) = steps(target, hybrid.Drafter(Watched(), Looks()), {}, 1)
    own = dataclasses.replace(
        state.drafter,
        found=jnp.full((1, K), 7, jnp.int32),
        score=jnp.full(1, 3.0),
        expected=jnp.full(1, 2.0),
    )
    state = dataclasses.replace(state, drafter=own)
    assert [looks_up(state, depth).item() for depth in (K, 2, 1)] == [True, True, False]


def test_rows_take_the_proposal_that_is_expected_to_be_longer(target, draft):
    """And the average is that of the model's rounds alone."""
    drafter = hybrid.Drafter(draft_model.Drafter(draft.config, 2), suffix.Drafter(K), memory=0.5)
    assert drafter.num_speculative_tokens == K and drafter.model_tokens == 2
    average, looked = np.full(3, 1.0), 0
    before = None
    for program, params, state in steps(target, drafter, draft.params, 12, PROMPTS, 60):
        own = state.drafter
        if before is not None:
            accepted = np.argmax(np.asarray(state.accepted) - np.asarray(before.accepted), axis=1)
            average = np.where(looks_up(before), average, (average + accepted) / 2)
            np.testing.assert_allclose(own.expected, average, rtol=1e-6)
            now = drafting.round_of(state.tokens, state.lengths)
            found, _ = drafter.lookup.propose({"drafter": {}}, (), now)
            better = (found.tokens[:, 0] >= 0) & (found.expected >= own.expected)
            np.testing.assert_array_equal(looks_up(state), better)
            proposal, _ = decode.propose(program, params, state, state.keys)
            rows = looks_up(state)
            looked += rows.sum()
            np.testing.assert_array_equal(proposal.tokens[rows], found.tokens[rows])
            assert (np.asarray(proposal.tokens)[~rows, 2:] == -1).all()
        before = state
    assert 0 < looked < 33


def test_draft_of_a_model_that_rested_is_that_of_one_that_never_did(target, draft):
    """Its tokens and distributions are those after a fresh prefill of the text.

    Also where another row made the model run while this one looked up.
    """
    drafter = hybrid.Drafter(draft_model.Drafter(draft.config, K), suffix.Drafter(K), memory=0.9)
    alone = decode.Program(
        target.config, draft_model.Drafter(draft.config, K), rejection.Verifier()
    )
    compared, mixed, rested = 0, 0, np.zeros(3, bool)
    for program, params, state in steps(target, drafter, draft.params, 14, PROMPTS, 80):
        looked = looks_up(state)
        if (back := rested & ~looked).any():
            proposal, _ = decode.propose(program, params, state, state.keys)
            rows, limits = state.rows, state.limits
            fresh = decode.prefill(
                alone, 96, params, rows, state.tokens, state.lengths, limits, state.keys
            )
            expected, _ = decode.propose(alone, params, fresh, fresh.keys)
            np.testing.assert_array_equal(proposal.tokens[back], expected.tokens[back])
            np.testing.assert_allclose(proposal.probs[back], expected.probs[back], atol=1e-5)
            compared += back.sum()
            mixed += 0 if rested.all() else back.sum()
        rested = looked
    assert compared and mixed


@pytest.mark.parametrize("name", ["draft_model", "eagle", "early_exit", "medusa", "mlp_speculator"])
@pytest.mark.parametrize("count", (None, "auto"))
def test_greedy_text_is_the_targets(target, draft, name, count):
    loaded = drafting.build(name, draft, 2)
    drafter = hybrid.Drafter(loaded.drafter, suffix.Drafter(6))
    together = LoadedDrafter("together", drafter, loaded.params)
    out = spsjax.generate(target, PROMPTS, together, count, sampling=GREEDY, max_new_tokens=40)
    expected = spsjax.generate(target, PROMPTS, sampling=GREEDY, max_new_tokens=40)
    for tokens, others in zip(out.tokens, expected.tokens):
        np.testing.assert_array_equal(tokens, others)


def test_rule_of_the_model_hears_of_its_own_rounds_alone(target, draft):
    """Each row's bound moves in the rounds that the model drafted, and stays in the others."""
    rule = stopping.Adaptive(stopping.Confidence(0.4), step=0.5)
    drafter = hybrid.Drafter(
        draft_model.Drafter(draft.config, K, stop_rule=rule), suffix.Drafter(K), memory=0.5
    )
    before, moved = None, np.zeros(2, int)
    for _, _, state in steps(target, drafter, draft.params, 12, PROMPTS, 60):
        if before is not None:
            same = np.asarray(state.drafter.rule.rate == before.drafter.rule.rate)
            looked = looks_up(before)
            assert same[looked].all()
            moved += looked.sum(), (~same).sum()
        before = state
    assert moved.all()


def test_look_up_that_expects_nothing_is_refused(target, draft):
    drafter = hybrid.Drafter(draft_model.Drafter(draft.config, K), ngram.Drafter(K))
    with pytest.raises(InputError, match=r"^lookup: expected a drafter without a state, such as"):
        spsjax.generate(target, PROMPTS, LoadedDrafter("x", drafter, draft.params))


def test_parts_that_do_not_fit_are_refused(draft):
    model = draft_model.Drafter(draft.config, K)
    whole = hybrid.Drafter(model, suffix.Drafter(K))
    for lookup in (model, whole, copy.Drafter(K)):
        with pytest.raises(InputError, match=r"^lookup: expected a drafter without a state"):
            hybrid.Drafter(model, lookup)
    with pytest.raises(InputError, match=r"^model: expected a drafter with K >= 1"):
        hybrid.Drafter(none.Drafter(), suffix.Drafter(K))


def test_load_drafter_takes_both_by_one_name(target, draft):
    rule = stopping.Entropy()
    loaded = spsjax.load_drafter(
        "suffix+pystdlib/draft", spsjax.load("pystdlib/target"), stop_rule=rule
    )
    assert loaded.drafter.model.stop_rule == rule
    assert isinstance(loaded.drafter.model, draft_model.Drafter)
    assert isinstance(loaded.drafter.lookup, suffix.Drafter)
    with pytest.raises(InputError, match=r"^suffix\+ngram: expected a drafter with weights"):
        spsjax.load_drafter("suffix+ngram", target)
    head = drafting.build("eagle", draft, 2)
    shape = dataclasses.replace(draft.config, num_layers=2)
    other = hybrid.Drafter(dataclasses.replace(head.drafter, target=shape), suffix.Drafter())
    stranger = LoadedDrafter("x", other, head.params)
    with pytest.raises(
        InputError, match=r"^drafter x: expected a drafter of this target's features"
    ):
        spsjax.generate(target, PROMPTS, stranger)
    chosen = draft_model.Drafter(draft.config, tree=Tree((0, 0)))
    with pytest.raises(InputError, match=r"^model: expected a drafter of chains"):
        hybrid.Drafter(chosen, suffix.Drafter())
    with pytest.raises(InputError, match=r"^memory: expected"):
        hybrid.Drafter(draft_model.Drafter(draft.config), suffix.Drafter(), memory=2.0)
    with pytest.raises(InputError, match="expected weights of its config"):
        spsjax.generate(
            target, PROMPTS, hybrid.Drafter(draft_model.Drafter(draft.config), suffix.Drafter())
        )
