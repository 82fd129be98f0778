"""Tests of numbers that are traced: another value is another outcome, and compiles nothing."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting

import spsjax
from spsjax import decode, loading, types, verifiers
from spsjax.benchmarks import forced_acceptance
from spsjax.decode import confidence
from spsjax.drafters import draft_model, hybrid, sample, stopping, suffix
from spsjax.drafters.base import Drafter
from spsjax.drafters.contrib import learned_stopping
from spsjax.utils import compilation, traced
from spsjax.utils.compilation import compiled
from spsjax.verifiers import rejection, typical

K, PROMPTS = 2, [[3, 4, 5, 3, 4, 5, 3], [9, 2, 9]]
OF_WEIGHTS = {"embed_scale", "output_scale", "softcap"}  # constants of a checkpoint
BASES = Drafter, stopping.Rule, verifiers.Verifier, decode.schedule.Schedule


@dataclasses.dataclass(frozen=True)
class Numbers:
    """An object of all kinds of fields."""

    label: str
    share: float = traced.number()
    count: int = traced.number(3)
    limit: float = traced.number(1.0, off=1.0)
    inner: object = None

    def __post_init__(self):
        assert self.share <= 1, "checks are not for traced numbers"


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque:
    """An object that equals only itself."""

    inner: Numbers


def hybrid_of(
    draft, threshold=0.3, share=0.9, step=0.3, factor=1.0, min_prob=0.1, memory=0.8
) -> loading.LoadedDrafter:
    """Returns a drafter with numbers at all depths."""
    rule = stopping.Adaptive(stopping.Confidence(threshold), share, step)
    model = stopping.Drafter(draft_model.Drafter(draft.config, K), rule)
    lookup = suffix.Drafter(K, factor=factor, min_prob=min_prob)
    return loading.LoadedDrafter("x", hybrid.Drafter(model, lookup, memory=memory), draft.params)


def classes_with_numbers() -> list[type]:
    """Returns the concrete classes of the package that jitted functions take as static."""
    actual, left = set(), [*BASES]
    while left:
        subclasses = left.pop().__subclasses__()
        actual |= {cls for cls in subclasses if cls.__module__.startswith("spsjax.")}
        left += subclasses
    return sorted((cls for cls in actual if not inspect.isabstract(cls)), key=repr)


def test_split_takes_numbers_out_at_all_depths():
    one, other = (
        ((Numbers("a", x, 4, 0.5, Numbers("b", 2 * x)), K), "c", Numbers("d", 1))
        for x in (0.1, 0.5)
    )
    static, numbers = traced.split(one)
    assert numbers == (0.1, 4, 0.5, 0.2, 3, 1.0, 3)
    assert list(map(type, numbers)) == [float, int, float, float, int, float, int]
    others = traced.split(other)
    assert (static, hash(static)) == (others[0], hash(others[0]))
    assert traced.join(static, numbers) == one and traced.join(static, others[1]) == other
    assert static not in (one, other)
    assert traced.join(static, ["checked by nobody"] * 7)[2].share == "checked by nobody"


def test_split_keeps_what_is_no_number():
    """A value that switches something off, one that is none, and objects that are not values."""
    off, on = Numbers("a", 0.5, inner=None), Numbers("a", 0.5, limit=0.25)
    assert traced.split((off,))[1] == (0.5, 3) and traced.split((on,))[1] == (0.5, 3, 0.25)
    assert traced.split((off,))[0] != traced.split((on,))[0]
    none = Numbers("a", 0.5, None)
    assert (
        traced.split((none,))[1] == (0.5,) and traced.split((none,))[0] != traced.split((off,))[0]
    )
    for same in (Opaque(off), "text", 0.5, decode.Program(None, None, rejection.Verifier(1))):
        static, numbers = traced.split((same,))
        assert static[0] is same and not numbers


def test_every_float_of_a_drafter_or_rule_is_a_number():
    """Otherwise each of its values would be compiled."""
    numbers = set()
    for cls in classes_with_numbers():
        marked = {field.name: traced._OFF in field.metadata for field in dataclasses.fields(cls)}
        floats = {field.name for field in dataclasses.fields(cls) if field.type is float}
        assert all(marked[name] for name in floats - OF_WEIGHTS), (
            f"{cls}: {floats} are not all traced"
        )
        numbers |= {cls} if any(marked.values()) else set()
    expected = {suffix.Drafter, hybrid.Drafter, rejection.Verifier, typical.Verifier}
    expected |= {stopping.Confidence, stopping.Entropy, stopping.Adaptive}
    expected |= {learned_stopping.Disco, learned_stopping.SpecDec, forced_acceptance.Verifier}
    expected |= {decode.schedule.Fastest, decode.schedule.Fixed}
    assert numbers == expected | {confidence.Confident, confidence.Surviving}


@pytest.mark.parametrize(
    ("numbers", "lenience"),
    [
        ({"threshold": 0.9}, 0.5),
        ({"share": 0.1}, 0.5),
        ({"step": 0.9}, 0.5),
        ({"factor": 2.0}, 0.5),
        ({"min_prob": 0.9}, 0.5),
        ({"memory": 1.0}, 0.5),
        ({}, 0.05),
    ],
    ids=str,
)
def test_generate_with_another_number_compiles_nothing(target, draft, numbers, lenience):
    """The number arrives: more or fewer tokens are proposed or accepted than with the first one."""

    def outcome(numbers, lenience):
        with drafting.small_programs():
            stats = spsjax.generate(
                target,
                PROMPTS,
                hybrid_of(draft, **numbers),
                sampling=spsjax.SamplingParams(temperature=0.5),
                max_new_tokens=24,
                seed=2,
                verifier=rejection.Verifier(lenience),
                stop_at_eos=False,
            ).stats
        return stats, (stats.proposed_tokens, stats.accepted_histogram)

    _, first = outcome({}, 0.5)
    stats, other = outcome(numbers, lenience)
    assert stats.compile_seconds == 0
    assert first != other


def test_rejection_sample_with_another_lenience_compiles_nothing():
    draft, target = np.asarray([[[0.9, 0.1]]] * 64), np.asarray([[[0.1, 0.9]] * 2] * 64)
    arguments = jax.random.key(0), np.zeros((64, 1), int), draft, target
    accepted = []
    for lenience in (0.9, 0.5, 0.2):
        if accepted:
            compiled_at = compilation._newest.ended
        _, number = spsjax.rejection_sample(*arguments, lenience)
        accepted.append(int(np.sum(number) - 64))
    assert compilation._newest.ended == compiled_at
    assert 0 < accepted[0] < accepted[1] < accepted[2]


def scheduled(schedule):
    """Returns states and depths of a schedule after some rounds of (asked, offered, accepted)."""
    costs = decode.schedule.Costs(*jnp.asarray([[0, 0.1, 0.2], [1, 1, 1.1]]))
    costs = dataclasses.replace(costs, rates=jnp.asarray([0.9, 0.5]))
    state, results = schedule.init(costs, 2, K), []
    for counts in ([2, 2, 1], [2, 1, 1], [0, 0, 0]):
        state = schedule.update(state, *(jnp.full(2, count) for count in counts))
        results.append((state, schedule.depths(costs, state, jnp.asarray([False, True]))))
    return results


def ended(rule):
    """Returns the state of a rule after a round, and the chains that it ends then."""
    state = rule.update(rule.init(2), jnp.asarray([2, 2]), jnp.asarray([1, 2]), K)
    logits = jnp.log(jnp.asarray([[0.7, 0.2, 0.1], [0.4, 0.3, 0.3]]))
    drawn = sample.Drawn(logits, None, jnp.asarray([1, 0]), 0)
    return state, rule.ends(None, rule.start(state, 2), drawn)


def accepted(rule):
    """Returns the probabilities that a verifier accepts the tokens of a chain."""
    probs = jnp.asarray([[[0.6, 0.3, 0.1], [0.05, 0.05, 0.9], [0.2, 0.3, 0.5]]])
    proposal = types.Proposal(jnp.asarray([[0, 2]]), probs[:, :2])
    return rule.accept_probs(proposal, probs[:, ::-1])


@pytest.mark.parametrize(
    ("function", "first", "second"),
    [
        (scheduled, decode.schedule.Fastest(), decode.schedule.Fastest(0.5, 0.6, 0.2, 3.0, 1.0)),
        (ended, stopping.Adaptive(stopping.Entropy()), stopping.Adaptive(stopping.Entropy(1, 0.9))),
        (accepted, typical.Verifier(), typical.Verifier(0.5, 5.0)),
        (accepted, rejection.Verifier(0.9), rejection.Verifier(0.3)),
        (accepted, forced_acceptance.Verifier(0.9), forced_acceptance.Verifier(0.3)),
    ],
    ids=("fastest", "entropy", "typical", "rejection", "forced"),
)
def test_traced_numbers_give_what_static_ones_give(function, first, second):
    before, _ = compiled(function, first)()
    result, seconds = compiled(function, second)()
    expected = jax.jit(functools.partial(function, second))()
    assert seconds == 0
    leaves = zip(*map(jax.tree.leaves, (before, result, expected)), strict=True)
    differ = False
    for old, new, static in leaves:
        assert (new.dtype, new.weak_type) == (static.dtype, static.weak_type)
        np.testing.assert_allclose(new, static, rtol=1e-6)
        differ |= not np.array_equal(old, new)
    assert differ
