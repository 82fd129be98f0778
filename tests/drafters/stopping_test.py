"""Rules that end a chain of draft tokens: their arithmetic, the saved work, what is refused.

That they are lossless is enumerated in `whole_texts_test`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting, toy_drafters
from helpers.calls import Call, assert_same_texts

import spsjax
from spsjax import InputError, SamplingParams, Tree, loading
from spsjax.drafters import sample, stopping
from spsjax.utils.compilation import compiled

LOGITS = np.log(np.asarray([[0.7, 0.2, 0.1], [0.4, 0.3, 0.3], [1.0, 1e-30, 1e-30]], np.float32))
GREEDY = SamplingParams(temperature=0.0)
K, PROMPTS, NEW = 2, [[3, 4, 5], [9]], 16


def ends(rule, tokens, state=(), logits=LOGITS):
    """Returns which chains a rule ends after their newest tokens."""
    return compiled(_ends, rule)(logits, np.asarray(tokens), state)[0]


def _ends(rule, logits, tokens, state):
    return rule.ends(None, state, sample.Drawn(logits, None, tokens, 0))[0]


def after_round(rule, offered, accepted, most):
    """Returns the state of a rule after its first round."""
    return compiled(_after_round, rule)(*map(np.asarray, (offered, accepted, most)))[0]


def _after_round(rule, offered, accepted, most):
    return rule.update(rule.init(len(offered)), offered, accepted, most)


def test_confidence_ends_after_a_token_of_low_probability():
    rule = stopping.Confidence(0.25)
    np.testing.assert_array_equal(ends(rule, [1, 1, 0]), [True, False, False])


def test_entropy_ends_after_an_uncertain_distribution():
    """The entropies are 0.80, 1.09 and 0 nats, and 0.35 and 0.40 the roots of 0.15 of them."""
    for threshold, expected in ((0.3, [True, True, False]), (0.37, [False, True, False])):
        rule = stopping.Entropy(threshold=threshold)
        np.testing.assert_array_equal(ends(rule, [0, 0, 0]), expected)
    impossible = np.asarray([[0, -np.inf, -np.inf], [0, 0, -np.inf], [0, 0, 0]], np.float32)
    ended = ends(stopping.Entropy(), [0, 0, 0], logits=impossible)
    np.testing.assert_array_equal(ended, [False, True, True])


def test_bound_follows_the_share_of_accepted_tokens():
    """By hand: from 0.9 half of the way to the last share; it stays if nothing was offered."""
    rule = stopping.Adaptive(stopping.Confidence(0.4), step=0.1)
    rounds = [4, 4, 2, 0, 2, 2], [2, 4, 2, 0, 2, 2], [4, 4, 4, 4, 2, 3]
    after = after_round(rule, *rounds)
    np.testing.assert_allclose(after.rate, [0.7, 0.95, 0.95, 0.9, 0.95, 0.95], rtol=1e-6)
    np.testing.assert_allclose(after.bound, [0.41, 0.4, 0.39, 0.4, 0.4, 0.39], rtol=1e-6)
    far = dataclasses.replace(rule, rule=stopping.Confidence(0.9), step=1.0, inertia=0.0)
    np.testing.assert_allclose(after_round(far, *rounds).bound, [1, 0.9, 0, 0.9, 0.9, 0])
    bounds = np.asarray([0.1, 0.31, 0.9], np.float32)  # of tokens of probability 0.2, 0.3 and 1
    np.testing.assert_array_equal(ends(rule, [1, 1, 0], bounds), [False, True, False])
    entropy = stopping.Adaptive(stopping.Entropy(threshold=0.3))
    assert after_round(entropy, *rounds).bound[3] == pytest.approx(0.7)
    for wrong in (stopping.Adaptive(stopping.Entropy()), 0.5):
        with pytest.raises(InputError, match=r"^rule: expected Confidence or Entropy, found"):
            stopping.Adaptive(wrong)
    with pytest.raises(InputError, match=r"^share: expected"):
        stopping.Adaptive(stopping.Entropy(), share=2.0)


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "share", "sign"), [(1.0, 0.0, -1), (0.0, 1.0, 1)])
def test_loop_moves_the_bound(target, draft, threshold, share, sign):
    """A bound that hardly anything passes falls, and one that all pass rises."""
    rule = stopping.Adaptive(stopping.Confidence(threshold), share, step=0.1)
    drafter = loading.with_stop_rule(loading.as_drafter(draft, target), target, rule)
    request = Call(target, PROMPTS, drafter, K, verifier="rejection", stop_at_eos=False)
    state = request.prefill()
    assert state.drafter[1].bound.tolist() == [threshold] * 2
    state = request.loop.run(state, 4)
    assert (np.sign(state.drafter[1].bound - threshold) == sign).all()


def test_steps_after_the_end_of_all_chains_are_not_run():
    """Row 0 ends after token 2, row 1 after token 3: of 6 steps 3 are run; 2 if row 1 is done."""
    steps = []

    def feed(state, level):
        jax.debug.callback(lambda: steps.append(1))
        return jnp.zeros((2, 1, 8)).at[:, 0, level.depth].set(99.0), None, state

    last = jnp.asarray([1, 2])
    stops = sample.Stops((), lambda state, drawn: (drawn.index == last, state))

    @jax.jit
    def draft(done):
        now = drafting.round_of(
            jnp.zeros((2, 1), jnp.int32),
            jnp.ones(2, jnp.int32),
            GREEDY.rows(2),
            jax.random.split(jax.random.key(0), 2),
        )
        now = dataclasses.replace(now, done=done, stops=stops)
        return sample.grow(None, 6, feed, (), now)[0].tokens

    for done, row, count in ((False, [0, 1, 2, -1, -1, -1], 3), (True, [-1] * 6, 2)):
        tokens = draft(np.asarray([False, done]))
        np.testing.assert_array_equal(tokens, [[0, 1, -1, -1, -1, -1], row])
        jax.effects_barrier()
        assert len(steps) == count
        steps.clear()


@pytest.mark.slow
def test_greedy_text_is_unchanged_and_less_is_proposed(target, draft):
    rule = stopping.Entropy()
    options = {"sampling": GREEDY, "max_new_tokens": NEW, "stop_at_eos": False}
    expected = spsjax.generate(target, PROMPTS, **options)
    drafter = loading.with_stop_rule(loading.as_drafter(draft, target), target, rule)
    out = spsjax.generate(target, PROMPTS, drafter, K, **options)
    assert_same_texts(out.tokens, expected.tokens)
    rounds = sum(out.stats.accepted_histogram)
    assert rounds <= out.stats.proposed_tokens < K * rounds
    assert sum(out.stats.accepted_histogram[1:])


def test_rules_have_names():
    assert stopping.by_name("entropy") == stopping.Entropy()
    assert stopping.by_name("confidence:0.25") == stopping.Confidence(0.25)
    adaptive = stopping.Adaptive(stopping.Entropy(threshold=0.5))
    assert stopping.by_name("adaptive-entropy:0.5") == adaptive
    for text in ("odd", "entropy:x", "entropy:", ""):
        with pytest.raises(InputError, match=r"^stop_rule: expected confidence or entropy, also"):
            stopping.by_name(text)
    with pytest.raises(InputError, match=r"^threshold: expected a finite number"):
        stopping.by_name("confidence:2")


def test_rule_that_does_not_fit_is_refused(target, draft):
    rule, loaded = stopping.Entropy(), loading.as_drafter(draft, target)
    refusal = r"^stop_rule: expected a drafter that samples chains, as only these end early, found "
    with pytest.raises(InputError, match=refusal + "ngram"):
        spsjax.load_drafter("ngram", target, stop_rule=rule)
    with pytest.raises(InputError, match=refusal + "draft_model"):
        stopping.Drafter(loading.as_drafter(draft, target, Tree((0, 0))).drafter, rule)
    with pytest.raises(InputError, match=refusal + "none"):
        spsjax.load_drafter("none", target, stop_rule=rule)
    with pytest.raises(InputError, match=refusal + "stopping"):
        stopping.Drafter(stopping.Drafter(loaded.drafter, rule), rule)
    with pytest.raises(InputError, match=r"^stop_rule: expected a rule of drafters.stopping"):
        loading.with_stop_rule(loaded, target, 0.5)
    with pytest.raises(InputError, match=r"^threshold: expected a finite number"):
        stopping.Confidence(2.0)


def test_drafter_that_does_not_sample_with_grow_is_refused(target):
    """It would ignore the rule. That is seen when its draft is traced."""
    drafter = stopping.Drafter(toy_drafters.Tapped(32, 48), stopping.Entropy())
    weights = {"heads": jnp.zeros((3, 64, 48))}
    loaded = loading.LoadedDrafter("tapped", drafter, weights)
    with pytest.raises(InputError, match=r"^stop_rule: expected .* found toy_drafters"):
        spsjax.generate(target, PROMPTS, loaded, max_new_tokens=4)
