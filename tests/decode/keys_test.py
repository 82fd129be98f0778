"""Keys: no two roles of a round, no two rows and no two rounds share a random number.

All numbers that a compiled loop uses are written down while it runs. Systems of the field drew the
residual with the noise that had drafted the rejected token. Then the two are not independent, and
the texts do not follow the target's distribution.
"""

import collections
import functools

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import Call

import spsjax
from spsjax import SamplingParams, Tree, decode, sampling, verifiers
from spsjax.drafters import base, draft_model
from spsjax.loading import LoadedDrafter
from spsjax.types import Proposal
from spsjax.utils import compilation

K = 3
CHAIN = {sampling.DRAFT, sampling.ACCEPT, sampling.NEXT}


class Recorder:
    """Random numbers that were used in rounds of rows that were not done.

    A row that is done repeats its numbers, which are not used. A test uses so few of 2**23 numbers
    that two of them are hardly ever equal by chance.
    """

    def __init__(self):
        self.rounds, self._numbers = collections.Counter(), []

    def note_round(self, keys, done):
        self.rounds.update(map(tuple, np.asarray(keys)[~np.asarray(done)].tolist()))

    def note_numbers(self, role, keys, numbers):
        self._numbers.append((role, np.asarray(keys), np.asarray(numbers)))

    def check(self, roles, least):
        """Asserts that these roles had numbers of their own in at least so many rounds."""
        jax.effects_barrier()
        assert len(self.rounds) >= least and max(self.rounds.values()) == 1
        uses, seen = collections.Counter(), collections.Counter()
        for role, keys, numbers in self._numbers:
            for key, row in zip(map(tuple, keys.tolist()), numbers.tolist()):
                if key in self.rounds:
                    uses[key, role] += 1
                    seen.update(row)
        assert {role for _, role in uses} == roles
        assert max(uses.values()) == 1, "a role of one round asked twice"
        assert max(seen.values()) == 1, "two roles, rows or rounds share their numbers"
        assert sum(role == sampling.NEXT for _, role in uses) == len(self.rounds)


@pytest.fixture
def recorder(monkeypatch):
    recorder, uniforms, step = Recorder(), sampling.uniforms, decode.step.step

    def watched_step(program, params, state, *args, **options):
        keys = jax.random.key_data(decode.step.round_keys(state))
        jax.debug.callback(recorder.note_round, keys, state.done)
        return step(program, params, state, *args, **options)

    def watched(keys, role, count):
        note, numbers = functools.partial(recorder.note_numbers, role), uniforms(keys, role, count)
        jax.debug.callback(note, jax.random.key_data(keys), numbers)
        return numbers

    monkeypatch.setattr(sampling, "uniforms", watched)
    monkeypatch.setattr(decode.step, "step", watched_step)
    compilation.clear()  # of programs that nobody watches
    with drafting.small_programs():  # filters and sizes ask for no numbers
        yield recorder
    compilation.clear()


@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        ("rejection", None),
        pytest.param("traversal", Tree((0, 0, 1)), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_generate_uses_each_number_once(recorder, target, draft, rule, tree):
    """Rows of equal prompts have keys of their own, and so has every round."""
    depth = K if tree is None else tree.depth
    drafter = draft_model.Drafter(draft.config, depth, tree=tree)
    loaded = LoadedDrafter("", drafter, draft.params)
    prompts = [3, 4, 5], [3, 4, 5], [9], [1, 2]
    spsjax.generate(target, prompts, loaded, verifier=rule, max_new_tokens=16)
    recorder.check(CHAIN, least=3 * 16 // (K + 1))


@pytest.mark.parametrize("rule", verifiers.NAMES)
def test_rule_asks_once_for_numbers_of_a_role(monkeypatch, rule):
    """It takes the keys of the round as they are. That is traced, and nothing is compiled."""
    asked, uniforms = [], sampling.uniforms

    def watched(keys, role, count):
        asked.append((keys, role))
        return uniforms(keys, role, count)

    monkeypatch.setattr(sampling, "uniforms", watched)
    rule, probs = verifiers.by_name(rule), np.full((2, 4, 5), 0.2, np.float32)
    tokens, parents = np.asarray([[[1, 2, 3]] * 2, [[0, 0, 1]] * 2], np.int32)
    proposal = Proposal(tokens, probs[:, :3], parents if rule.trees else None)

    def verify(keys, proposal, probs):
        verdict = rule.verify(keys, proposal, probs)
        assert all(own is keys for own, _ in asked)
        return verdict

    keys = jax.eval_shape(lambda: sampling.row_keys(jax.random.key(0), 2))
    jax.eval_shape(verify, keys, proposal, probs)
    roles = [role for _, role in asked]
    assert sampling.NEXT in roles and sorted({*roles} - {sampling.DRAFT}) == sorted(roles)


def test_rounds_without_a_draft_use_numbers_of_their_own(recorder, target, draft, monkeypatch):
    """Rounds with a draft and rounds without share no number."""
    monkeypatch.setattr(base, "SCHEDULED_TOKENS", 1)
    chain = drafting.build("draft_model", draft, 1)
    call = Call(
        target, [[3, 4, 5], [9]], chain, "auto", SamplingParams(), 18, 0, "rejection", False
    )
    state = call.prefill(decode.schedule.only(0, 1))
    for depth in (0, 1, 0, 1):
        state = call.loop.run(state, 1, decode.schedule.only(depth, 1))
    recorder.check(CHAIN, least=6)


@pytest.mark.slow
def test_engine_uses_each_number_once(recorder, target, draft):
    """Three requests in two rows: a row gets new keys with a new request."""
    engine = spsjax.Engine(target, draft, K, rows=2, slots=64, rounds=2)
    for seed, prompt in enumerate(([7, 7], [3, 4], [3, 4])):
        engine.submit(prompt, max_new_tokens=12, seed=seed)
    while engine.step():
        pass
    recorder.check(CHAIN, least=9)
