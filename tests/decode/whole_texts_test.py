"""Losslessness by enumeration: the distribution of whole texts is the target's, to 1e-12.

`enumeration.Loop` runs spsjax's own step in float64 over every draft path and every verdict, and
`reference` computes the target's distribution. The gate enumerates four kinds of loop; the law of a
round of all drafters and verifiers is proven there by parts, in `draws_test`, `exactness_test` and
`contract_test`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import confident, drafting, enumeration, reference, table_drafters, table_model
from helpers.table_drafters import END, VOCAB

from spsjax import DynamicTree, Tree, decode
from spsjax.drafters import stopping, suffix
from spsjax.drafters.contrib import learned_stopping
from spsjax.loading import LoadedDrafter
from spsjax.verifiers import lenience as lenient
from spsjax.verifiers import match, rejection

TOLERANCE = 1e-12
PARAMS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.7, "top_p": 0.7003},
    {"min_p": 0.3007},
    {"temperature": 1.5, "top_k": 2, "top_p": 0.9003, "min_p": 0.2503},
)
WARM = {"temperature": 1.7}
GROWN = DynamicTree(3, 2, 2)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unfiltered():
    """Compiles loops without filters, which are the same code for all drafters."""
    with drafting.small_programs():
        yield


def loop(drafter="draft_model", K=2, new=3, eos_ids=(END,), seed=0, prompt=(0,), **options):
    """Returns the loop of a drafter, or of the drafter of a name, over random tables."""
    name = drafter if isinstance(drafter, str) else ""
    return enumeration.Loop(
        table_drafters.build(name, K) if name else drafter,
        table_model.table(VOCAB, seed),
        table_model.table(VOCAB, seed + 1),
        len(prompt) + new,
        eos_ids,
        prompt,
        **{"verifier": drafting.verifier(name)} | options,
    )


def target_distribution(loop, **params):
    """Returns the oracle's distribution of the loop's texts."""
    model = table_model.model_of(loop.target)
    return reference.joint_distribution(model, loop.prompt, loop.limit, loop.eos_ids, **params)


def assert_lossless(loop, *sets):
    """Asserts that the loop's distribution is the target's, for some sampling parameters."""
    for params in sets:
        distribution = loop.distribution(**params)
        assert abs(sum(distribution.values()) - 1) < TOLERANCE
        expected = target_distribution(loop, **params)
        assert enumeration.distance(distribution, expected) < TOLERANCE, params


# The gate: no drafter, a draft model, a tree, and a drafter on the target's features. The limit of
# four tokens is no multiple of K + 1, so that rounds are cut off at every position.


def test_no_drafter_is_autoregressive_sampling():
    """Without a drafter the loop is Algorithm 1 of the paper."""
    assert_lossless(loop("none", 0, 4), *PARAMS)


@pytest.mark.smoke
def test_draft_model_is_lossless():
    assert_lossless(loop("draft_model", 2, 4), *PARAMS[::5])


@pytest.mark.usefixtures("unfiltered")
def test_tree_matching_is_lossless():
    """Matching is lossless on random trees with holes, twins and nodes that are not eligible."""
    assert_lossless(loop("random_tree", 2, 3), WARM)


@pytest.mark.usefixtures("unfiltered")
def test_drafter_on_target_features_is_lossless():
    assert_lossless(loop("eagle3", 2, 3), WARM)


def test_draws_from_the_target_after_a_rejection_are_found(monkeypatch):
    """The other faults that a verifier could have are in `exactness_test`."""
    monkeypatch.setattr(rejection, "residual", lambda draft, target, lenience: target)
    enumeration._step.cache_clear()
    studied = loop("draft_model", 1, 2)
    assert enumeration.distance(studied.distribution(), target_distribution(studied)) > 0.01
    enumeration._step.cache_clear()


# The full suite: every drafter, rules that end chains, depths that vary, other K.


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
def test_draft_model_of_more_tokens_than_the_limit_is_lossless():
    assert_lossless(loop("draft_model", 3, 2, seed=3), WARM)


@pytest.mark.slow
def test_draft_opposite_to_target_is_lossless():
    """After the filters most ratios are zero, and most residuals are the whole target."""
    studied = loop("draft_model", 2, 4)
    studied = dataclasses.replace(studied, draft=-3 * studied.target)
    assert_lossless(studied, {"temperature": 0.0}, {"top_k": 2})


@pytest.mark.slow
def test_draft_equal_to_target_is_lossless():
    """Empty residuals, up to rounding, are lossless."""
    studied = loop("draft_model", 2, 4)
    assert_lossless(dataclasses.replace(studied, draft=studied.target), PARAMS[3])


# Rules with a state: one that reads probabilities, and one that judges a token a step later.
RULES = {
    "adaptive": stopping.Adaptive(stopping.Confidence(0.5), step=0.5, inertia=0.0),
    "specdec": learned_stopping.SpecDec(0.4, least=1),
}


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
@pytest.mark.parametrize("name", RULES)
def test_chain_that_ends_early_is_lossless(name):
    rule, loaded = RULES[name], table_drafters.build("draft_model", 2)
    studied = loop(LoadedDrafter("", stopping.Drafter(loaded.drafter, rule), None))
    if isinstance(rule, learned_stopping.LearnedRule):
        weights = rule.init_params(jax.random.key(2), VOCAB)
        studied.params["drafter"] = stopping.WithRule(studied.params["drafter"], weights)
    assert_lossless(studied, {})


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
@pytest.mark.parametrize(("name", "rule", "biased"), confident.CASES)
def test_chain_that_is_cut_by_estimates_is_lossless(name, rule, biased):
    """A token is judged before it is drawn. A rule that looks at what follows it has a bias."""
    seed = 3 if name == "dspark" else 0  # so that some decisions depend on a token
    studied = loop(name, 2, seed=seed)
    studied.program = dataclasses.replace(studied.program, schedule=rule)
    studied.costs = confident.COSTS
    assert_lossless(studied, WARM)
    studied.program = dataclasses.replace(studied.program, schedule=biased)
    distribution = studied.distribution(**WARM)
    assert enumeration.distance(distribution, target_distribution(studied, **WARM)) > 0.001


LOOK_UPS = "copy", "ngram", "successors", "suffix"
ENUMERATED = "draft_model", "eagle3", "none", "random_tree"  # by other tests


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
@pytest.mark.parametrize("name", sorted({*drafting.NAMES} - {*ENUMERATED}))
def test_drafter_is_lossless(name):
    """Some of lookahead's n-grams begin alike; the hybrid takes look-ups and drafts.

    A look-up's prompt has no match, and most of the longer contexts have one.
    """
    prompt = {"hybrid": (0, 1, 0)}.get(name, (0, 1) if name in LOOK_UPS else (0,))
    assert_lossless(loop(name, 2, 4 if name in LOOK_UPS else 3, prompt=prompt), WARM)


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
def test_trees_of_suffix_decoding_are_lossless():
    """The prompt's 0 was followed by 1 and by 0: the tree has both."""
    loaded = LoadedDrafter("", suffix.Drafter(2, num_tree_tokens=4, factor=2.0), {})
    assert_lossless(loop(loaded, prompt=(0, 1, 0, 0), verifier=match.Verifier()), WARM)


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("eagle3", GROWN),
        ("falcon", Tree((0, 0, 1))),
        ("medusa", Tree((0, 0, 1), chosen=True)),
        *((name, GROWN) for name in drafting.BLOCKS),
        *((name, Tree((0, 0, 1), chosen=True)) for name in drafting.BLOCKS),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_trees_of_features_are_lossless(name, tree):
    """A tree that grows, a tree that is drawn, and one of the best tokens."""
    options = {"markov_kind": "rnn"} if name == "dspark" else {}
    loaded = table_drafters.head(name, 2, tree=tree, **options)
    assert_lossless(loop(loaded, verifier=match.Verifier()), WARM)


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
def test_tree_matching_of_deeper_trees_is_lossless():
    assert_lossless(loop("random_tree", 3, 2, eos_ids=()), {})


@dataclasses.dataclass(frozen=True)
class FromState(decode.schedule.Schedule):
    """A schedule whose state is the depth of the next round."""

    def init(self, costs, batch, num_speculative_tokens):
        return jnp.zeros(batch, jnp.int32)

    def depths(self, costs, state, done_B):
        return jnp.where(done_B, 0, state)

    def update(self, state, asked_B, offered_B, accepted_B):
        return state


@dataclasses.dataclass
class ByHistory(enumeration.Loop):
    """A loop in which the text so far decides how deep a row is drafted, 0 included."""

    def __post_init__(self):
        super().__post_init__()
        self.program = dataclasses.replace(self.program, schedule=FromState())

    def starts(self, params):
        prefixes, state = super().starts(params)
        depths = np.zeros(len(state.lengths), np.int32)
        depths[: len(prefixes)] = [sum(prefix) % (self.K + 1) for prefix in prefixes]
        return prefixes, dataclasses.replace(state, history=jnp.asarray(depths))

    def check_caches(self, output):
        """Drafters read later what they missed in rounds without a draft."""


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
@pytest.mark.parametrize("name", ["draft_model", "dspark", "eagle", "early_exit", "tli"])
def test_depths_that_vary_with_the_text_are_lossless(name):
    """A drafter reads later what it missed, at once or before it drafts, or needs nothing."""
    studied = loop(name, 2, 3)
    fields = {field.name: getattr(studied, field.name) for field in dataclasses.fields(studied)}
    assert_lossless(ByHistory(**fields), WARM)


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
def test_draft_of_a_fixed_depth_is_lossless():
    """The costs fix a depth of 1, as they do while rounds are timed, for n-grams of two tokens."""
    studied = loop("lookahead", 2, 3)
    studied.program = dataclasses.replace(studied.program, schedule=decode.schedule.Fastest())
    studied.costs = decode.schedule.only(1, 2)
    assert_lossless(studied, WARM)


@pytest.mark.slow
@pytest.mark.usefixtures("unfiltered")
@pytest.mark.parametrize(("drafter", "lenience"), [("draft_model", 0.4), ("ngram", 0.8)])
def test_lenience_gives_the_lenient_distribution(drafter, lenience):
    """With a lenience the loop emits `lenient_distribution`, and its bias is `lenience_bias`."""
    verifier = rejection.Verifier(lenience)
    studied = loop(drafter, K=1, new=1, eos_ids=(), verifier=verifier, prompt=(0, 1, 0))
    distribution = studied.distribution(**WARM)
    target_probs, draft_probs = (
        reference.to_probs(table_model.model_of(table)(studied.prompt), **WARM)
        for table in (studied.target, studied.draft)
    )
    if drafter == "ngram":
        draft_probs = np.eye(VOCAB)[1]  # what followed the 0 before
    emitted = np.asarray([distribution[(token,)] for token in range(VOCAB)])
    expected = lenient.lenient_distribution(draft_probs, target_probs, lenience)
    np.testing.assert_allclose(emitted, expected, atol=TOLERANCE)
    bias = lenient.lenience_bias(draft_probs, target_probs, lenience)
    np.testing.assert_allclose(np.abs(emitted - target_probs).sum() / 2, bias, atol=TOLERANCE)
    # The bias is not zero, and enumeration shows it.
    exact = target_distribution(studied, **WARM)
    assert bias > 1e-3 and enumeration.distance(distribution, exact) > 1e-3
    assert lenient.lenience_bias(draft_probs, target_probs, 1.0) < TOLERANCE
