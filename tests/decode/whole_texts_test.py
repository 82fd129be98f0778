"""Losslessness by enumeration: the joint distribution of emitted tokens is the target's to 1e-12.

`enumeration.Loop` runs spsjax's own step in float64 over every draft path and every verdict.
`reference` computes the target's distribution. The same check rejects every faulty verifier of
`mutants`, and accepts the sound one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import broken_verifiers, drafting, enumeration, reference, toy_drafters

from spsjax import DynamicTree, Tree, pacing, sampling
from spsjax.drafters import (
    copy,
    draft_model,
    early_exit,
    hybrid,
    learned_stopping,
    lookahead,
    ngram,
    none,
    sparse_self,
    stopping,
    suffix,
)
from spsjax.loading import LoadedDrafter
from spsjax.models.config import Skipped
from spsjax.types import Proposal
from spsjax.verifiers import lenience as lenient
from spsjax.verifiers import match, rejection

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
FEW = PARAMS[0], PARAMS[1], PARAMS[5]  # where only the drafter differs: filters are shared
# (K, new tokens, end-of-sequence ids). The limits are below and above K + 1, and not multiples of
# it, so that rounds are cut off at every position.
SHAPES = ((1, 3, ()), (2, 4, (END,)), (3, 2, (END,)))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@dataclasses.dataclass(frozen=True)
class Seeded(lookahead.Drafter):
    """Lookahead whose pool has n-grams from the beginning, some of which begin alike."""

    def prefill(self, params, state, tokens_BT, next_BT, starts_B, lengths_B, output):
        state = super().prefill(params, state, tokens_BT, next_BT, starts_B, lengths_B, output)
        values = np.random.default_rng(8).integers(0, VOCAB, (self.pool, self.num_nodes))
        values = jnp.asarray(values[:, : self.num_speculative_tokens], jnp.int32)
        keys = jnp.arange(self.pool, dtype=jnp.int32) % VOCAB
        return dataclasses.replace(
            state,
            keys=jnp.broadcast_to(keys, state.keys.shape),
            values=jnp.broadcast_to(values, state.values.shape),
        )


@dataclasses.dataclass(frozen=True)
class Looked(hybrid.Drafter):
    """Whose first round already takes what was looked up, if there is anything."""

    def prefill(self, params, state, tokens_BT, next_BT, starts_B, lengths_B, output):
        state = super().prefill(params, state, tokens_BT, next_BT, starts_B, lengths_B, output)
        found, _ = self.lookup.propose({"drafter": {}}, (), drafting.round_of(tokens_BT, lengths_B))
        own = {"found": found.tokens, "score": found.expected}
        return dataclasses.replace(state, **own, expected=jnp.full_like(found.expected, 0.7))


def drafters(K, length):
    """Returns a tiny instance of every drafter."""
    heads = np.random.default_rng(5).normal(0, 1, (K, 2 * VOCAB, VOCAB))
    table_config = enumeration.config(VOCAB)
    small = dataclasses.replace(table_config, sinks=1, recent=1)
    return {
        "copy": LoadedDrafter("", copy.Drafter(K), {}),
        "draft_model": LoadedDrafter("", draft_model.Drafter(table_config, K), None),
        "early_exit": LoadedDrafter("", self_draft(K), {}),
        **{name: head(name, K) for name in drafting.HEADS},
        "hybrid": LoadedDrafter(
            "", Looked(draft_model.Drafter(table_config, K), suffix.Drafter(K)), None
        ),
        "lookahead": LoadedDrafter("", Seeded(K, window=1, num_guesses=2, pool=9), {}),
        "ngram": LoadedDrafter("", ngram.Drafter(K, max_ngram=2), {}),
        "none": LoadedDrafter("", none.Drafter(), {}),
        "random_tree": LoadedDrafter("", toy_drafters.RandomTree(table_config, K, 4), None),
        "sparse_self": LoadedDrafter("", small_cache(K), {}),
        "suffix": LoadedDrafter("", suffix.Drafter(K), {}),
        "windowed": LoadedDrafter("", draft_model.Drafter(small, K), None),
        "tapped": LoadedDrafter(
            "", toy_drafters.Tapped(VOCAB, VOCAB, K), {"heads": jnp.asarray(heads)}
        ),
    }


def self_draft(K):
    """Returns a drafter that leaves out all of the target; its stream is the table's logits."""
    target = dataclasses.replace(enumeration.config(VOCAB), d_model=VOCAB)
    return early_exit.Drafter(target, Skipped((0,), (0,)), K)


def small_cache(K):
    """Returns a drafter that sees the first and the last token of a text."""
    return sparse_self.Drafter(enumeration.config(VOCAB), K, sinks=1, recent=1)


def head(name, K):
    """Returns a drafter that reads a table's logits as features, with random weights."""
    config = dataclasses.replace(enumeration.config(VOCAB), d_model=VOCAB, d_ff=4)
    drafter = drafting.head(name, config, num_speculative_tokens=K)
    params = drafter.init_params(jax.random.key(6), jnp.float64)
    grown = {
        key: jax.tree.map(lambda leaf: 8 * leaf, value)
        for key, value in params.items()
        if key not in ("ids", "norm", "embed_norm", "feature_norm")
    }
    return LoadedDrafter("", drafter, params | grown)


def loop(drafter="draft_model", K=2, new=3, eos_ids=(END,), seed=0, prompt=(0,), **options):
    """Returns the loop of one drafter over random tables."""
    length = len(prompt) + new + K
    return enumeration.Loop(
        drafters(K, length)[drafter],
        enumeration.table(VOCAB, length, seed),
        enumeration.table(VOCAB, length, seed + 1),
        len(prompt) + new,
        eos_ids,
        prompt,
        **{"verifier": drafting.verifier(drafter)} | options,
    )


def target_distribution(loop, **params):
    """Returns the oracle's distribution of the loop's texts."""
    model = enumeration.model_of(loop.target)
    return reference.joint_distribution(model, loop.prompt, loop.limit, loop.eos_ids, **params)


def assert_lossless(loop, **params):
    """Asserts that the loop's distribution is the target's."""
    distribution = loop.distribution(**params)
    assert abs(sum(distribution.values()) - 1) < TOLERANCE
    expected = target_distribution(loop, **params)
    assert enumeration.distance(distribution, expected) < TOLERANCE, params


def test_every_drafter_has_an_enumerated_instance():
    assert sorted(drafters(2, 4)) == sorted(drafting.NAMES)


@pytest.mark.parametrize(("K", "new", "eos_ids"), SHAPES)
def test_draft_model_is_lossless(K, new, eos_ids):
    studied = loop("draft_model", K, new, eos_ids, seed=K)
    for params in PARAMS:
        assert_lossless(studied, **params)


RULES = {
    "confidence": stopping.Confidence(0.5),
    "entropy": stopping.Entropy(scale=1.0, threshold=0.9),
    "adaptive": stopping.Adaptive(stopping.Confidence(0.5), step=0.5, inertia=0.0),
    "disco": learned_stopping.Disco(0.4, top=2, width=4),
    "specdec": learned_stopping.SpecDec(0.4, least=1),
}


@pytest.mark.parametrize(
    ("name", "K", "params"), [*((name, 2, FEW) for name in RULES), ("specdec", 3, PARAMS[:1])]
)
def test_chain_that_ends_early_is_lossless(name, K, params):
    studied, rule = loop("draft_model", K, 3), RULES[name]
    drafter, weights = dataclasses.replace(studied.drafter, stop_rule=rule), None
    if isinstance(rule, learned_stopping.LearnedRule):
        weights = rule.init_params(jax.random.key(2), VOCAB)
    loaded = LoadedDrafter("", drafter, None, rule_params=weights)
    studied = dataclasses.replace(studied, loaded=loaded)
    for some in params:
        assert_lossless(studied, **some)


def test_dropping_the_token_that_ends_a_chain_is_rejected(monkeypatch):
    """Then improbable tokens are never proposed, though the draft's distribution has them."""
    propose = draft_model.Drafter.propose

    def drops(*args):
        proposal, state = propose(*args)
        chosen = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]
        kept = jnp.cumprod(chosen >= 0.3, axis=1) > 0
        tokens = jnp.where(kept, proposal.tokens, -1)
        return dataclasses.replace(proposal, tokens=tokens), state

    monkeypatch.setattr(draft_model.Drafter, "propose", drops)
    enumeration._step.cache_clear()
    assert rejected(loop("draft_model", 1, 2))
    enumeration._step.cache_clear()


@pytest.mark.parametrize(("K", "new", "eos_ids"), SHAPES[::2])
@pytest.mark.parametrize("name", ["early_exit", "sparse_self"])
def test_target_that_drafts_for_itself_is_lossless(name, K, new, eos_ids):
    """The scoring pass continues what an early exit has begun; a small cache lacks tokens."""
    studied = loop(name, K, new, eos_ids, seed=K)
    for params in FEW:
        assert_lossless(studied, **params)


def test_hybrid_is_lossless():
    """Some rounds take what was looked up, and others the model's draft."""
    for prompt, new in (((0, 1, 0), 3), ((0,), 4)):
        studied = loop("hybrid", 2, new, prompt=prompt)
        for params in FEW:
            assert_lossless(studied, **params)


@pytest.mark.parametrize("name", ["copy", "ngram", "suffix"])
def test_drafter_without_weights_is_lossless(name):
    # The prompt repeats itself, so that most contexts have a match. Some have none.
    for prompt, new in (((0, 1, 0), 4), ((0,), 4)):
        studied = loop(name, 3, new, prompt=prompt)
        for params in FEW:
            assert_lossless(studied, **params)


def test_trees_of_suffix_decoding_are_lossless():
    """The prompt's 0 was followed by 1 and by 0: the tree has both."""
    loaded = LoadedDrafter("", suffix.Drafter(2, num_tree_tokens=4, factor=2.0), {})
    studied = loop("suffix", 2, 3, prompt=(0, 1, 0, 0), verifier=match.Verifier())
    studied = dataclasses.replace(studied, loaded=loaded)
    for params in (PARAMS[0], PARAMS[5]):
        assert_lossless(studied, **params)


def test_lookahead_is_lossless():
    """Some of the pool's n-grams begin alike, and the window is never accepted."""
    studied = loop("lookahead", 2, 3)
    for params in FEW:
        assert_lossless(studied, **params)


@pytest.mark.parametrize("depth", (1, 2))
@pytest.mark.parametrize("name", ["draft_model", "lookahead"])
def test_draft_of_any_chosen_depth_is_lossless(name, depth):
    studied = loop(name, 2, 3)
    drafter = dataclasses.replace(studied.drafter.paced(), num_speculative_tokens=2)
    studied = dataclasses.replace(studied, loaded=LoadedDrafter("", drafter, studied.loaded.params))
    studied.program = dataclasses.replace(studied.program, pacer=pacing.Fastest())
    studied.params["costs"] = jax.tree.map(jnp.asarray, pacing.forced(depth, 2))
    for params in (PARAMS[0], PARAMS[5]):
        assert_lossless(studied, **params)


@dataclasses.dataclass(frozen=True)
class AsTold(pacing.Pacer):
    """A pacer whose state is the depth of the next round."""

    def init(self, costs, batch, num_speculative_tokens):
        return jnp.zeros(batch, jnp.int32)

    def depths(self, costs, state, done_B):
        return jnp.where(done_B, 0, state)

    def update(self, costs, state, asked_B, offered_B, accepted_B):
        return state


@dataclasses.dataclass
class ByHistory(enumeration.Loop):
    """A loop in which the text so far decides how deep a row is drafted, 0 included."""

    def __post_init__(self):
        super().__post_init__()
        self.program = dataclasses.replace(self.program, pacer=AsTold())
        equal = jnp.ones(self.K + 1)
        self.params["costs"] = jax.tree.map(jnp.asarray, pacing.Costs(equal, equal, 0))

    def _start(self, prefixes, params):
        depths = [sum(prefix) % (self.K + 1) for prefix in prefixes]
        return dataclasses.replace(super()._start(prefixes, params), pace=jnp.asarray(depths))

    def _check_caches(self, output):
        """Drafters that rest read what they missed later."""


@pytest.mark.parametrize(
    "name", ["draft_model", "eagle", "early_exit", "hybrid", "ngram", "sparse_self", "windowed"]
)
def test_depths_that_vary_with_the_text_are_lossless(name):
    studied = loop(name, 2, 3)
    fields = {field.name: getattr(studied, field.name) for field in dataclasses.fields(studied)}
    paced = dataclasses.replace(studied.drafter.paced(), num_speculative_tokens=2)
    fields["loaded"] = dataclasses.replace(studied.loaded, drafter=paced)
    for params in (PARAMS[0], PARAMS[5]):
        assert_lossless(ByHistory(**fields), **params)


@pytest.mark.parametrize("name", drafting.HEADS)
def test_drafters_of_features_are_lossless(name):
    """EAGLE-3 drafts two of the three tokens only."""
    studied = loop(name, 2, 3)
    for params in FEW:
        assert_lossless(studied, **params)


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("eagle3", Tree((0, 0, 1))),
        ("eagle3", Tree((0, 0, 1), chosen=True)),
        ("eagle3", DynamicTree(3, 2, 2)),
        ("falcon", Tree((0, 0, 1))),
        ("medusa", Tree((0, 0, 1), chosen=True)),
        ("mlp_speculator", DynamicTree(3, 2, 2)),
    ],
    ids=("drawn", "chosen", "dynamic", "falcon", "medusa", "mlp_speculator"),
)
def test_trees_of_features_are_lossless(name, tree):
    loaded = head(name, 2)
    loaded = dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, tree=tree))
    studied = loop(name, 2, 3, verifier=match.Verifier())
    studied = dataclasses.replace(studied, loaded=loaded)
    for params in (PARAMS[0], PARAMS[5]):
        assert_lossless(studied, **params)


@pytest.mark.parametrize("params", FEW)
def test_tree_matching_is_lossless(params):
    """Matching is lossless on random trees with holes, twins and nodes that are not eligible."""
    assert_lossless(loop("random_tree", 2, 3), **params)


@pytest.mark.parametrize("seed", range(3))
def test_tree_matching_of_deeper_trees_is_lossless(seed):
    assert_lossless(loop("random_tree", 3, 2, seed=seed, eos_ids=()))


def test_broken_tree_matching_is_rejected(monkeypatch):
    """Enumeration rejects a token after the accepted ones that is drawn at the root."""
    walk = match.walk

    def broken(proposal, drawn, mass):
        verdict = walk(proposal, drawn, mass)
        last = jnp.arange(drawn.shape[1]) == verdict.num_tokens[:, None] - 1
        tokens = jnp.where(last, drawn[:, :1], verdict.tokens)
        return dataclasses.replace(verdict, tokens=tokens)

    monkeypatch.setattr(match, "walk", broken)
    enumeration._step.cache_clear()
    assert rejected(loop("random_tree", 2, 3))
    enumeration._step.cache_clear()


@pytest.mark.parametrize("params", FEW)
def test_drafter_on_target_features_is_lossless(params):
    assert_lossless(loop("tapped", 2, 3), **params)


def test_no_drafter_is_autoregressive_sampling():
    """Without a drafter the loop is Algorithm 1 of the paper."""
    studied = loop("none", 0, 4)
    for params in PARAMS:
        assert_lossless(studied, **params)


def test_draft_opposite_to_target_is_lossless():
    """Supports that hardly overlap are lossless.

    After the filters most ratios are zero, and most residuals are the whole target.
    """
    studied = loop("draft_model", *SHAPES[1])
    studied = dataclasses.replace(studied, draft=-3 * studied.target)
    for params in ({"top_k": 1}, {"top_k": 2}, {"temperature": 0.5, "top_p": 0.6003}):
        assert_lossless(studied, **params)


def test_draft_equal_to_target_is_lossless():
    """Empty residuals, up to rounding, are lossless."""
    studied = loop("draft_model", *SHAPES[1])
    studied = dataclasses.replace(studied, draft=studied.target)
    for params in (PARAMS[0], PARAMS[5]):
        assert_lossless(studied, **params)


@pytest.mark.parametrize(("drafter", "lenience"), [("draft_model", 0.4), ("ngram", 0.8)])
def test_lenience_gives_the_lenient_distribution(drafter, lenience):
    """With a lenience the loop emits `lenient_distribution`, and its bias is `lenience_bias`."""
    verifier = rejection.Verifier(lenience)
    studied = loop(drafter, K=1, new=1, eos_ids=(), verifier=verifier, prompt=(0, 1, 0))
    for params in (PARAMS[0], PARAMS[5]):
        distribution = studied.distribution(**params)
        target_probs, draft_probs = (
            reference.to_probs(enumeration.model_of(table)(studied.prompt), **params)
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
        exact = target_distribution(studied, **params)
        assert bias > 1e-3 and enumeration.distance(distribution, exact) > 1e-3
        assert lenient.lenience_bias(draft_probs, target_probs, 1.0) < TOLERANCE


def rejected(studied, fault=0) -> bool:
    """Returns whether enumeration rejects the loop, by an invariant or by the distribution."""
    try:
        distribution = studied.distribution(fault)
    except AssertionError:
        return True
    return not enumeration.distance(distribution, target_distribution(studied)) < TOLERANCE


@pytest.mark.parametrize("fault", broken_verifiers.FAULTS[:-1])
def test_broken_verifier_is_rejected(fault):
    """Enumeration rejects every faulty verifier of `mutants`, and accepts the sound one."""
    # Three new tokens, so that a bonus token after two drafts is emitted.
    studied = loop("draft_model", 2, 3, mutant=True)
    assert rejected(studied, fault=broken_verifiers.FAULTS.index(fault)) == (fault != "none")


@pytest.mark.parametrize("part", ("ratio", "draft_probs"))
def test_broken_ratio_or_draft_probs_are_rejected(monkeypatch, part):
    """A fault in spsjax's own verifier or drafter is rejected: enumeration runs that very code."""
    if part == "ratio":
        ratio = rejection.ratio
        monkeypatch.setattr(
            rejection, "ratio", lambda *args: (ratio(*args)[0] + 1e-9, ratio(*args)[1])
        )
    else:
        propose = draft_model.Drafter.propose

        def reports_another(*args):
            proposal, state = propose(*args)
            return dataclasses.replace(proposal, probs=proposal.probs + 1e-9), state

        monkeypatch.setattr(draft_model.Drafter, "propose", reports_another)
    enumeration._step.cache_clear()
    assert rejected(loop("draft_model", 1, 2))
    enumeration._step.cache_clear()


@pytest.mark.parametrize("fault", (None, "u = 0 accepts anything"))
def test_uniform_of_zero_accepts_no_impossible_token(monkeypatch, fault):
    """A uniform of zero accepts no token of probability zero, except in the faulty verifier."""
    sampler = rejection.rejection
    if fault is not None:
        sampler = broken_verifiers.verifier(broken_verifiers.FAULTS.index(fault))
    monkeypatch.setattr(sampling, "uniforms", lambda keys, role, count: jnp.zeros((1, count)))
    proposal = Proposal(jnp.asarray([[1, 0]]), jnp.asarray([[[0.5, 0.5], [0.5, 0.5]]]))
    target_probs = jnp.asarray([[[1.0, 0.0]] * 3])
    verdict = sampler(jax.random.split(jax.random.key(0), 1), proposal, target_probs)
    accepts = int(verdict.num_tokens[0]) > 1
    assert accepts == (fault is not None)
