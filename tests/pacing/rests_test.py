"""Rounds without a draft: nothing is lost, by any drafter, verifier and order of the rounds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting

import spsjax
from spsjax import SamplingParams, decode, pacing, request, sampling, verifiers
from spsjax.drafters import pending
from spsjax.utils.compilation import compiled
from spsjax.verifiers import rejection

PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
GREEDY = SamplingParams(temperature=0.0)
RULE = pacing.Fastest()
K = 3


# Those that read later what they missed, one that keeps what it drafted, and one that takes over
# what the target made of a round. `hybrid_test` has the hybrid; others have such states or none.
KINDS = "draft_model", "eagle3", "falcon", "lookahead", "sparse_self", "windowed"


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_rounds_without_a_draft_lose_nothing(target, draft, name, monkeypatch):
    """After any number of them the next proposal is that of a drafter that never paused."""
    monkeypatch.setattr(pending, "_ROOM", 32)  # so that some is read before the next draft
    loaded = drafting.build(name, draft, K)
    verifier = drafting.verifier(name)
    plain = decode.Program(target.config, loaded.drafter, verifier)
    paced = dataclasses.replace(plain, pacer=RULE)
    params = {"target": target.params, "drafter": loaded.params}
    tokens = np.zeros((4, 8), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in PROMPTS], np.int32)
    inputs = SamplingParams().rows(4), tokens, lengths, np.full(4, 170, np.int32)
    keys = sampling.row_keys(jax.random.key(1), 4)
    state, _ = compiled(decode.prefill, paced, 192)(params, *inputs, keys)
    run = jax.jit(drafting.small(functools.partial(decode.run, paced)))

    @jax.jit
    @drafting.small
    def proposed(params, state):
        state, now = decode.next_round(paced, params, state)
        return dataclasses.replace(decode.propose(paced, params, state, now), aux=())

    @jax.jit
    @drafting.small
    def undisturbed(params, tokens, lengths):
        if name in drafting.WITH_HISTORY:
            return None
        inputs_now = SamplingParams().rows(4), tokens, lengths, np.full(4, 170, np.int32), keys
        state = decode.prefill(plain, 192, params, *inputs_now)
        state, now = decode.next_round(plain, params, state)
        return dataclasses.replace(decode.propose(plain, params, state, now), aux=())

    for depth, rounds in ((0, 1), (2, 1), (0, 3), (K, 2), (0, 40), (1, 1), (K, 1)):
        forced = params | {"costs": pacing.forced(depth, K)}
        # Rounds without a draft follow each other in a loop of their own.
        for count in [rounds] if depth == 0 else [1] * rounds:
            before = state
            proposal = proposed(forced, state)
            if depth == 0:
                assert np.all(np.asarray(proposal.tokens) == -1)
            expected = undisturbed(params, state.tokens, state.lengths)
            if depth == K and expected is not None:
                np.testing.assert_array_equal(proposal.tokens, expected.tokens)
                if expected.probs is not None:
                    np.testing.assert_allclose(proposal.probs, expected.probs, atol=1e-4)
            state = run(forced, state, count)
            accepted = np.asarray(state.accepted) - np.asarray(before.accepted)
            assert not accepted[:, depth + 1 :].any()
            np.testing.assert_array_equal(state.rounds, before.rounds + count)
    assert not np.any(state.failed) and np.all(state.lengths > lengths + 45)


@dataclasses.dataclass(frozen=True)
class Sometimes(pacing.Pacer):
    """Drafts in one of four rounds, and in two of seven, of each row's own rounds."""

    K: int

    def init(self, costs, batch, num_speculative_tokens):
        return jnp.zeros(batch, jnp.int32)

    def depths(self, costs, state, done_B):
        return jnp.where(done_B | (state % 4 != 1) & (state % 7 < 5), 0, 1 + state % self.K)

    def update(self, costs, state, asked_B, offered_B, accepted_B):
        return state + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "random_tree"])
def test_loop_gives_what_its_rounds_give(target, draft, name):
    """Whether a row rests in a round of the loop of rests or in one like any other."""
    loaded, batch = drafting.build(name, draft, K), len(PROMPTS)
    verifier = drafting.verifier(name)
    program = decode.Program(target.config, loaded.drafter, verifier, pacer=Sometimes(K))
    params = {"target": target.params, "drafter": loaded.params, "costs": pacing.forced(-1, K)}
    tokens = np.tile(np.asarray([[3, 4, 5, 3]], np.int32), (batch, 1))
    lengths = np.asarray([4, 3, 4, 2], np.int32)
    limits = np.asarray([40, 30, 4, 36], np.int32)
    keys = sampling.row_keys(jax.random.key(2), batch)
    inputs = SamplingParams().rows(batch), tokens, lengths, limits, keys
    state, _ = compiled(decode.prefill, program, 64)(params, *inputs)
    step = jax.jit(drafting.small(functools.partial(decode.step, program)))
    run = jax.jit(drafting.small(functools.partial(decode.run, program)))
    one_by_one, states = state, []
    while not one_by_one.done.all():
        one_by_one = step(params, one_by_one)
        states.append(one_by_one)
    # Six rounds end between two drafts, eight between two rests.
    for count in (6, 8, len(states)):
        after, expected = run(params, state, count), states[count - 1]
        for field in ("lengths", "done", "failed", "rounds", "proposed", "accepted", "pace"):
            np.testing.assert_array_equal(getattr(after, field), getattr(expected, field))
        for row, length in enumerate(np.asarray(after.lengths)):
            np.testing.assert_array_equal(after.tokens[row, :length], expected.tokens[row, :length])
    histogram = np.asarray(one_by_one.accepted).sum(axis=0)
    assert histogram[0] > 20 and histogram[1:].sum() > 4


@drafting.small
def rest(program, params, state):
    """Returns the state after a round of rest."""
    return decode.step(decode.without_drafts(program), params, state)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", sorted(verifiers.NAMES))
def test_round_without_a_draft_is_one_of_plain_decoding(target, draft, verifier):
    """By any rule, which then has no token to decide on."""
    loaded = drafting.build("draft_model", draft, 1)
    if verifier in ("kseq", "multipath"):
        tree = spsjax.Tree.branching(2, replacement=True)
        loaded = spsjax.loading.as_drafter(draft, target, tree)
    options = GREEDY, 6, 0, verifier, True
    call = request.Request("generate", target, PROMPTS, loaded, None, *options)
    program = dataclasses.replace(call.program, pacer=RULE)
    params = call.params | {"costs": pacing.forced(0, 1)}
    any_rule = dataclasses.replace(program, verifier=rejection.Verifier())
    state, _ = compiled(decode.prefill, any_rule, 64)(params, *call.inputs)
    for _ in range(6):
        state, _ = compiled(rest, program)(params, state)
    assert not np.any(state.proposed) and np.all(state.done)
    expected = spsjax.generate(target, PROMPTS, sampling=GREEDY, max_new_tokens=6)
    for row, tokens in enumerate(expected.tokens):
        start, end = len(PROMPTS[row]), state.lengths[row]
        np.testing.assert_array_equal(state.tokens[row, start:end], tokens)
