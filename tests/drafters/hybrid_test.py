"""A look-up and a model in one drafter: who drafts, what runs, and what a paused model drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import assert_same_texts, padded
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

import spsjax
from spsjax import InputError, SamplingParams, Tree, decode, sampling
from spsjax.drafters import base, draft_model, hybrid, ngram, none, stopping, suffix
from spsjax.drafters.contrib import copy
from spsjax.loading import LoadedDrafter
from spsjax.types import Proposal
from spsjax.utils import traced
from spsjax.utils.compilation import compiled
from spsjax.verifiers import rejection

K, MODEL_TOKENS = 4, 2
GREEDY = SamplingParams(0.0)
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [1, 2, 1, 2, 1, 2], [9]]
CALLS = []  # one entry per draft of a `Watched`


@pytest.fixture(scope="module")
def target():
    return numpy_spread_model(48)


@pytest.fixture(scope="module")
def draft(target):
    return numpy_nearby_model(target)


@dataclasses.dataclass(frozen=True)
class Looks(base.Drafter):
    """Looks up token 7 in every place, and expects a given number of tokens."""

    num_speculative_tokens: int = K
    expects: float = traced.number(0.0)

    def propose(self, params, state, now):
        tokens = jnp.full((len(now.lengths), self.num_speculative_tokens), 7, jnp.int32)
        return Proposal(tokens, None, aux=jnp.full(len(now.lengths), self.expects))


@dataclasses.dataclass(frozen=True)
class Watched(base.Drafter):
    """Drafts token 9, and notes in CALLS how often it does."""

    num_speculative_tokens: int = K

    def propose(self, params, state, now):
        jax.debug.callback(lambda: CALLS.append(1))
        return Proposal(jnp.full((len(now.lengths), self.num_speculative_tokens), 9), None)


@dataclasses.dataclass(frozen=True)
class Guesses(ngram.Drafter):
    """Looks up like `ngram`, and expects between 0 and 4 tokens to be accepted."""

    def propose(self, params, state, now):
        expected = (7 * now.lengths % 5).astype(jnp.float32)
        return dataclasses.replace(super().propose(params, state, now), aux=expected)


def calls_of(function, *arguments):
    """Returns the result of a compiled function, and how often it has called a `Watched`."""
    CALLS.clear()
    result, _ = function(*arguments)
    jax.block_until_ready(result)
    jax.effects_barrier()
    return result, len(CALLS)


def both_of(draft) -> hybrid.Drafter:
    """Returns a hybrid of a draft model of two tokens at most and of a look-up."""
    rule = stopping.Adaptive(stopping.Confidence(0.4), step=0.5)
    model = stopping.Drafter(draft_model.Drafter(draft.config, MODEL_TOKENS), rule)
    return hybrid.Drafter(model, Guesses(K), memory=0.5)


def beginning(target, drafter, params):
    """Returns program, parameters and state of the rows of PROMPTS."""
    program = decode.Program(target.config, drafter, rejection.Verifier())
    weights = {"target": target.params, "drafter": params}
    return program, weights, fresh(program, weights, *padded(PROMPTS, 8))


def fresh(program, params, tokens, lengths):
    """Returns the state after a prefill of some tokens."""
    inputs = jax.device_put((GREEDY.rows(3), tokens, lengths, np.full(3, 80, np.int32)))
    keys = sampling.row_keys(jax.random.key(0), 3)
    return compiled(decode.prompt.prefill, program, 96)(params, *inputs, keys)[0]


def looks_up(state, depth=K) -> np.ndarray:
    """Returns which rows take what was looked up, if they are drafted so deep."""
    own = jax.tree.map(np.asarray, state.drafter)
    return np.asarray(hybrid.looks_up(own, np.full(len(own.score), depth, np.int32)))


def some_state(rows, score, expected) -> hybrid.State:
    """Returns a hybrid's state that has looked up token 7 everywhere."""
    actual = np.full((rows, K), 7, np.int32)
    score, expected = (np.full(rows, value, np.float32) for value in (score, expected))
    return hybrid.State((), actual, score, expected)


@pytest.mark.parametrize(("expects", "calls"), [(0.1, 7), (K + 1.0, 0)])
def test_model_does_not_run_while_all_rows_look_up(target, expects, calls):
    """Its average begins at half of K."""
    drafter = hybrid.Drafter(Watched(), Looks(expects=expects))
    program, params, state = beginning(target, drafter, {})
    step, count = compiled(drafting.small_step, program), 0
    for _ in range(7):
        (_, state), more = calls_of(step, params, state)
        count += more
    assert count == calls


def test_model_does_not_run_for_rows_that_are_done():
    """One row looks up, and the other, which would not, is done."""
    drafter = hybrid.Drafter(Watched(), Looks())
    propose = compiled(lambda drafter, *arguments: drafter.propose(*arguments), drafter)
    own, tokens = some_state(2, [3.0, 0.0], 1.0), np.zeros((2, 8), np.int32)
    for done, calls in ((False, 1), (True, 0)):
        now = drafting.round_of(tokens, np.asarray([3, 3], np.int32))
        now = dataclasses.replace(now, done=np.asarray([False, done]))
        proposal, count = calls_of(propose, {"drafter": {}}, own, now)
        assert proposal.tokens[0].tolist() == [7] * K
        assert count == calls


def test_score_counts_no_more_tokens_than_are_drafted():
    """Four tokens that are looked up are expected to give 3; of one, no more than 1 counts."""
    own = some_state(1, 3.0, 2.0)
    actual = [np.asarray(hybrid.looks_up(own, np.asarray([depth]))).item() for depth in (K, 2, 1)]
    assert actual == [True, True, False]


def looked_up(program, tokens, lengths) -> Proposal:
    """Returns what the look-up proposes alone."""
    now = drafting.round_of(tokens, lengths)
    return program.drafter.lookup.propose({"drafter": {}}, (), now)


@drafting.small
def synced_state(program, params, state):
    """Returns the state with which a round drafts."""
    return decode.step.next_round(program, params, state)[0]


@pytest.fixture(scope="module")
def rounds(target, draft):
    """Parameters, and of some rounds the synced state, both proposals, the state after it."""
    program, params, state = beginning(target, both_of(draft), draft.params)
    run, rounds = compiled(drafting.small_step, program), []
    for _ in range(14):
        actual, _ = compiled(looked_up, program)(state.tokens, state.lengths)
        synced, _ = compiled(synced_state, program)(params, state)
        (proposal, after), _ = run(params, state)
        rounds.append((synced, proposal, actual, after))
        state = after
    return params, rounds


def test_rows_take_the_proposal_that_is_expected_to_be_longer(draft, rounds):
    """And the average is that of the model's rounds alone."""
    drafter, average, looked = both_of(draft), np.full(3, 1.0), 0
    assert drafter.num_speculative_tokens == K and drafter.model_tokens == MODEL_TOKENS
    for before, proposal, actual, after in rounds[1]:
        rows, tokens = looks_up(before), np.asarray(proposal.tokens)
        expected, actual = jax.tree.map(np.asarray, (before.drafter.expected, actual))
        better = (actual.tokens[:, 0] >= 0) & (actual.aux >= expected)
        np.testing.assert_array_equal(rows, better)
        looked += rows.sum()
        np.testing.assert_array_equal(tokens[rows], actual.tokens[rows])
        assert (tokens[~rows, MODEL_TOKENS:] == -1).all()
        accepted = np.argmax(np.asarray(after.accepted) - np.asarray(before.accepted), axis=1)
        average = np.where(rows, average, (average + accepted) / 2)
        np.testing.assert_allclose(after.drafter.expected, average, rtol=1e-6)
    assert 0 < looked < 33


def test_draft_of_a_model_that_paused_is_that_of_one_that_did_not(target, draft, rounds):
    """Also where another row made the model run while this one looked up."""
    model = draft_model.Drafter(draft.config, MODEL_TOKENS)
    alone = decode.Program(target.config, model, rejection.Verifier())
    propose = compiled(drafting.small_propose, alone)
    params, compared, mixed, paused = rounds[0], 0, 0, np.zeros(3, bool)
    for state, proposal, *_ in rounds[1]:
        looked = looks_up(state)
        if (back := paused & ~looked).any():
            again = fresh(alone, params, np.asarray(state.tokens), np.asarray(state.lengths))
            expected, _ = propose(params, again, state.keys)
            tokens = np.asarray(proposal.tokens)[:, :MODEL_TOKENS]
            there = back[:, None] & (tokens >= 0)  # a chain may end early
            np.testing.assert_array_equal(tokens[there], np.asarray(expected.tokens)[there])
            probs = np.asarray(proposal.probs)[:, :MODEL_TOKENS][there]
            np.testing.assert_allclose(probs, np.asarray(expected.probs)[there], atol=1e-5)
            compared += back.sum()
            mixed += 0 if paused.all() else back.sum()
        paused = looked
    assert compared and mixed


def test_rule_of_the_model_learns_from_its_own_rounds_alone(rounds):
    """Each row's bound moves in the rounds that the model drafted, and stays in the others."""
    moved = np.zeros(2, int)
    for state, _, _, after in rounds[1]:
        same = np.equal(*(np.asarray(each.drafter.model[1].rate) for each in (state, after)))
        looked = looks_up(state)
        assert same[looked].all()
        moved += looked.sum(), (~same).sum()
    assert moved.all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("eagle", None), ("early_exit", "auto")])
def test_greedy_text_is_the_targets(target, draft, name, count, monkeypatch):
    """Also if its model reads features late, or begins the target's pass: not of all tokens."""
    monkeypatch.setattr(base, "SCHEDULED_TOKENS", K)  # of which few depths are compiled
    loaded = drafting.build(name, draft, 2)
    drafter = hybrid.Drafter(loaded.drafter, suffix.Drafter(K))
    together = LoadedDrafter("together", drafter, loaded.params)
    out = spsjax.generate(target, PROMPTS, together, count, sampling=GREEDY, max_new_tokens=40)
    expected = spsjax.generate(target, PROMPTS, sampling=GREEDY, max_new_tokens=40)
    assert_same_texts(out.tokens, expected.tokens)


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
    with pytest.raises(InputError, match=r"^drafter: expected one with K >= 1"):
        hybrid.Drafter(none.Drafter(), suffix.Drafter(K))


def test_paths_of_trees_are_refused(target, draft):
    """They have as many nodes as a chain. That they are trees is seen when they are traced."""
    model = draft_model.Drafter(draft.config, tree=Tree((0, 1)))
    chain = draft_model.Drafter(draft.config, 4)
    for drafter, name in (
        (hybrid.Drafter(model, suffix.Drafter(2)), "drafter"),
        (hybrid.Drafter(chain, suffix.Drafter(4, num_tree_tokens=4)), "lookup"),
    ):
        loaded = LoadedDrafter("x", drafter, draft.params)
        with pytest.raises(InputError, match=f"^{name}: expected a drafter of chains"):
            spsjax.generate(target, PROMPTS, loaded, max_new_tokens=4)


def test_load_drafter_takes_both_by_one_name(target, draft):
    rule = stopping.Entropy()
    loaded = spsjax.load_drafter(
        "suffix+pystdlib/draft", spsjax.load("pystdlib/target"), stop_rule=rule
    )
    assert loaded.drafter.drafter.rule == rule
    assert isinstance(loaded.drafter.drafter.drafter, draft_model.Drafter)
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
    with pytest.raises(InputError, match=r"^drafter: expected a drafter of chains"):
        hybrid.Drafter(chosen, suffix.Drafter())
    with pytest.raises(InputError, match=r"^memory: expected"):
        hybrid.Drafter(draft_model.Drafter(draft.config), suffix.Drafter(), memory=2.0)
    with pytest.raises(InputError, match="expected weights of its config"):
        spsjax.generate(
            target, PROMPTS, hybrid.Drafter(draft_model.Drafter(draft.config), suffix.Drafter())
        )
