"""Rounds without a draft: nothing is lost, by any drafter, verifier and order of the rounds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import padded

from spsjax import SamplingParams, decode, sampling
from spsjax.drafters import pending
from spsjax.utils.compilation import compiled

PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
RULE = decode.schedule.Fastest()
K = 3


# Those that read later what they missed, one that keeps what it drafted, and one that takes over
# what the target made of a round. `hybrid_test` has the hybrid; others have such states or none.
KINDS = "draft_model", "eagle3", "falcon", "lookahead", "sparse_self", "tli", "windowed"


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_rounds_without_a_draft_lose_nothing(target, draft, name, monkeypatch):
    """After any number of them the next proposal is that of a drafter that never paused."""
    monkeypatch.setattr(pending, "_SLOTS", 32)  # so that some are read before the next draft
    loaded = drafting.build(name, draft, K)
    verifier = drafting.verifier(name)
    plain = decode.Program(target.config, loaded.drafter, verifier)
    scheduled = dataclasses.replace(plain, schedule=RULE)
    params = {"target": target.params, "drafter": loaded.params}
    tokens, lengths = padded(PROMPTS, 8)
    inputs = SamplingParams().rows(4), tokens, lengths, np.full(4, 170, np.int32)
    keys = sampling.row_keys(jax.random.key(1), 4)
    state, _ = compiled(decode.prompt.prefill, scheduled, 192)(params, *inputs, keys)
    run = jax.jit(drafting.small(functools.partial(decode.step.run, scheduled)))

    @jax.jit
    @drafting.small
    def proposed(params, costs, state):
        depths = RULE.depths(costs, state.history, state.done)
        state, now = decode.step.next_round(scheduled, params, state, depths)
        return dataclasses.replace(decode.step.propose(scheduled, params, state, now), aux=())

    @jax.jit
    @drafting.small
    def undisturbed(params, tokens, lengths):
        if name in drafting.WITH_HISTORY:
            return None
        inputs_now = SamplingParams().rows(4), tokens, lengths, np.full(4, 170, np.int32), keys
        state = decode.prompt.prefill(plain, 192, params, *inputs_now)
        state, now = decode.step.next_round(plain, params, state)
        return dataclasses.replace(decode.step.propose(plain, params, state, now), aux=())

    for depth, rounds in ((0, 1), (2, 1), (0, 3), (K, 2), (0, 40), (1, 1), (K, 1)):
        costs = decode.schedule.only(depth, K)
        # Rounds without a draft follow each other in a loop of their own.
        for count in [rounds] if depth == 0 else [1] * rounds:
            before = state
            proposal = proposed(params, costs, state)
            if depth == 0:
                assert np.all(np.asarray(proposal.tokens) == -1)
            expected = undisturbed(params, state.tokens, state.lengths)
            if depth == K and expected is not None:
                np.testing.assert_array_equal(proposal.tokens, expected.tokens)
                if expected.probs is not None:
                    np.testing.assert_allclose(proposal.probs, expected.probs, atol=1e-4)
            state = run(params, state, count, costs)
            accepted = np.asarray(state.accepted) - np.asarray(before.accepted)
            assert not accepted[:, depth + 1 :].any()
            np.testing.assert_array_equal(state.rounds, before.rounds + count)
    assert not np.any(state.failed) and np.all(state.lengths > lengths + 45)


@dataclasses.dataclass(frozen=True)
class Sometimes(decode.schedule.Schedule):
    """Drafts in one of four rounds, and in two of seven, of each row's own rounds."""

    K: int

    def init(self, costs, batch, num_speculative_tokens):
        return jnp.zeros(batch, jnp.int32)

    def depths(self, costs, state, done_B):
        return jnp.where(done_B | (state % 4 != 1) & (state % 7 < 5), 0, 1 + state % self.K)

    def update(self, state, asked_B, offered_B, accepted_B):
        return state + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "random_tree"])
def test_loop_gives_what_its_rounds_give(target, draft, name):
    """Whether a row skips drafting in a loop of such rounds or beside rows that draft."""
    loaded, batch = drafting.build(name, draft, K), len(PROMPTS)
    verifier = drafting.verifier(name)
    program = decode.Program(target.config, loaded.drafter, verifier, schedule=Sometimes(K))
    params = {"target": target.params, "drafter": loaded.params}
    tokens = np.tile(np.asarray([[3, 4, 5, 3]], np.int32), (batch, 1))
    lengths = np.asarray([4, 3, 4, 2], np.int32)
    limits = np.asarray([40, 30, 4, 36], np.int32)
    keys = sampling.row_keys(jax.random.key(2), batch)
    inputs = SamplingParams().rows(batch), tokens, lengths, limits, keys
    state, _ = compiled(decode.prompt.prefill, program, 64)(params, *inputs)
    step = jax.jit(drafting.small(functools.partial(decode.step.step, program)))
    run = jax.jit(drafting.small(functools.partial(decode.step.run, program)))
    one_by_one, states = state, []
    while not one_by_one.done.all():
        depths = program.schedule.depths(None, one_by_one.history, one_by_one.done)
        one_by_one = step(params, one_by_one, depths)
        states.append(one_by_one)
    # Six rounds end between two drafts, eight between two rests.
    for count in (6, 8, len(states)):
        after, expected = run(params, state, count), states[count - 1]
        for field in ("lengths", "done", "failed", "rounds", "proposed", "accepted", "history"):
            np.testing.assert_array_equal(getattr(after, field), getattr(expected, field))
        for row, length in enumerate(np.asarray(after.lengths)):
            np.testing.assert_array_equal(after.tokens[row, :length], expected.tokens[row, :length])
    histogram = np.asarray(one_by_one.accepted).sum(axis=0)
    assert histogram[0] > 20 and histogram[1:].sum() > 4
