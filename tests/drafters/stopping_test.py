"""Rules that end a chain of draft tokens: their arithmetic, the saved work, what is refused.

That they are lossless is enumerated in `whole_texts_test`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting

import spsjax
from spsjax import InputError, SamplingParams, Tree, execution, growth, loading
from spsjax.drafters import ngram, stopping
from spsjax.request import Request

LOGITS = np.log(np.asarray([[0.7, 0.2, 0.1], [0.4, 0.3, 0.3], [1.0, 1e-30, 1e-30]], np.float32))
GREEDY = SamplingParams(temperature=0.0)


def drawn(logits, tokens):
    return growth.Drawn(jnp.asarray(logits), None, jnp.asarray(tokens), 0)


def test_confidence_ends_after_a_token_of_low_probability():
    ends, _ = stopping.Confidence(0.25).ends(None, (), drawn(LOGITS, [1, 1, 0]))
    np.testing.assert_array_equal(ends, [True, False, False])


def test_entropy_ends_after_an_uncertain_distribution():
    """The entropies are 0.80, 1.09 and 0 nats, and 0.35 and 0.40 the roots of 0.15 of them."""
    for threshold, expected in ((0.3, [True, True, False]), (0.37, [False, True, False])):
        ends, _ = stopping.Entropy(threshold=threshold).ends(None, (), drawn(LOGITS, [0, 0, 0]))
        np.testing.assert_array_equal(ends, expected)
    certain = drawn([[0.0, -np.inf, -np.inf]], [0])
    assert not stopping.Entropy().ends(None, (), certain)[0][0]


def test_bound_follows_the_share_of_accepted_tokens():
    """By hand: the average moves from 0.9 half of the way to the last round's share.

    A row in which nothing was offered stays. All of a whole chain: the bound stays, too.
    """
    rule = stopping.Adaptive(stopping.Confidence(0.4), step=0.1)
    offered, accepted = jnp.asarray([4, 4, 2, 0]), jnp.asarray([2, 4, 2, 0])
    after = rule.update(rule.init(4), offered, accepted, 4)
    np.testing.assert_allclose(after.rate, [0.7, 0.95, 0.95, 0.9], rtol=1e-6)
    np.testing.assert_allclose(after.bound, [0.41, 0.4, 0.39, 0.4], rtol=1e-6)
    whole = rule.update(rule.init(2), jnp.asarray([2, 2]), jnp.asarray([2, 2]), jnp.asarray([2, 3]))
    np.testing.assert_allclose(whole.bound, [0.4, 0.39], rtol=1e-6)
    far = dataclasses.replace(rule, rule=stopping.Confidence(1.0), step=1.0, inertia=0.0)
    assert far.update(far.init(1), jnp.asarray([4]), jnp.asarray([0]), 4).bound[0] == 1
    tokens = drawn(LOGITS[[0, 1]], [1, 1])  # of probability 0.2 and 0.3
    ends, _ = rule.ends(None, jnp.asarray([0.1, 0.31]), tokens)
    np.testing.assert_array_equal(ends, [False, True])
    entropy = stopping.Adaptive(stopping.Entropy(threshold=0.3))
    assert entropy.init(1).bound[0] == pytest.approx(0.7)
    for wrong in (stopping.Adaptive(stopping.Entropy()), 0.5):
        with pytest.raises(InputError, match=r"^rule: expected Confidence or Entropy, found"):
            stopping.Adaptive(wrong)
    with pytest.raises(InputError, match=r"^share: expected"):
        stopping.Adaptive(stopping.Entropy(), share=2.0)


def test_loop_moves_the_bound(target, draft):
    """A bound that hardly anything passes falls, and one that all pass rises."""
    loaded = loading.as_drafter(draft, target)
    for threshold, share, sign in ((1, 0, -1), (0, 1, 1)):
        rule = stopping.Adaptive(stopping.Confidence(threshold), share, step=0.1)
        drafter = loading.with_stop_rule(loaded, target, rule)
        request = Request(
            "x", target, [[3, 4]], drafter, 6, SamplingParams(), 30, 0, "rejection", False
        )
        state, _ = execution.prefill(request)
        for rounds in (0, 4):
            if rounds:
                state, _ = execution.run(request, state, rounds)
            bound = float(state.rule.bound[0])
            assert bound == threshold if rounds == 0 else (bound - threshold) * sign > 0


def test_steps_after_the_end_of_all_chains_are_not_run():
    """Row 0 ends after token 2, row 1 after token 3: of 6 steps 3 are run; 2 if row 1 is done."""
    steps = []

    def feed(state, level):
        jax.debug.callback(lambda: steps.append(1))
        return jnp.zeros((2, 1, 8)).at[:, 0, level.depth].set(99.0), None, state

    last = jnp.asarray([1, 2])
    stops = growth.Stops((), lambda state, drawn: (drawn.tokens == last, state))
    now = drafting.round_of(
        jnp.zeros((2, 1), jnp.int32),
        jnp.ones(2, jnp.int32),
        GREEDY.rows(2),
        jax.random.split(jax.random.key(0), 2),
    )
    proposal, _, _ = jax.jit(lambda: growth.grow(None, 6, feed, (), now, stops))()
    np.testing.assert_array_equal(proposal.tokens, [[0, 1, -1, -1, -1, -1], [0, 1, 2, -1, -1, -1]])
    jax.effects_barrier()
    assert len(steps) == 3
    steps.clear()
    without = dataclasses.replace(now, done=jnp.asarray([False, True]))
    proposal, _, _ = jax.jit(lambda: growth.grow(None, 6, feed, (), without, stops))()
    np.testing.assert_array_equal(proposal.tokens, [[0, 1, -1, -1, -1, -1], [-1] * 6])
    jax.effects_barrier()
    assert len(steps) == 2


def test_greedy_text_is_unchanged_and_less_is_proposed(target, draft):
    loaded = loading.as_drafter(draft, target)
    prompts = [[3, 4, 5], [9]]
    options = {"sampling": GREEDY, "max_new_tokens": 16}
    expected = spsjax.generate(target, prompts, **options)
    whole = spsjax.generate(target, prompts, loaded, 6, **options)
    for rule in (
        stopping.Confidence(0.5),
        stopping.Entropy(),
        stopping.by_name("adaptive-entropy"),
    ):
        out = spsjax.generate(
            target, prompts, loading.with_stop_rule(loaded, target, rule), 6, **options
        )
        for tokens, same in zip(out.tokens, expected.tokens):
            np.testing.assert_array_equal(tokens, same)
        per_round = out.stats.proposed_tokens / out.stats.target_calls
        assert 1 <= per_round < whole.stats.proposed_tokens / whole.stats.target_calls


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
    with pytest.raises(InputError, match=r"^stop_rule: expected None for ngram, as only draft"):
        spsjax.load_drafter("ngram", target, stop_rule=rule)
    with pytest.raises(InputError, match=r"^stop_rule: expected None with a tree, as only chains"):
        dataclasses.replace(loaded.drafter, tree=Tree((0, 0)), stop_rule=rule)
    with pytest.raises(InputError, match=r"^stop_rule: expected a rule of drafters.stopping"):
        loading.with_stop_rule(loaded, target, 0.5)
    with pytest.raises(InputError, match=r"^stop_rule: expected None for x"):
        loading.with_stop_rule(loading.LoadedDrafter("x", ngram.Drafter(), {}), target, rule)
    with pytest.raises(InputError, match=r"^threshold: expected a finite number"):
        stopping.Confidence(2.0)
