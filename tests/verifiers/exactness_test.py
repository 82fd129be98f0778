"""Every verifier is lossless: the distribution of what it emits is the target's, to 1e-12.

`tree_enumeration` enumerates draft trees and verdicts. The same check rejects faulty verifiers,
which are made by changing one line of a sound one.
"""

import functools
import importlib
import inspect
import itertools
import types

import jax
import numpy as np
import pytest
from helpers import reference, table_model, tree_enumeration
from helpers.mutants import read
from helpers.tree_enumeration import Tree, Verification, branching

from spsjax import verifiers
from spsjax.verifiers import recursive, siblings, traversal

VOCAB = 3
TOLERANCE = 1e-12
CHAIN = branching(1, 1, 1)
RAGGED = Tree((0, 0, 0, 1, 1, 3))
SHAPES = branching(2, 1), branching(3), pytest.param(RAGGED, marks=pytest.mark.slow)
PARAMS = ({"temperature": 0.6, "top_k": 2}, {"temperature": 1.7, "top_p": 0.7003})
# A rule, and whether siblings are drawn without replacement.
SAMPLED = (
    ("recursive", False),
    ("recursive", True),
    ("traversal", False),
    ("traversal", True),
    ("kseq", False),
    ("multipath", False),
    ("match", False),
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def distributions(seed, **params):
    """Returns the distributions of draft and target by context, from random tables."""

    def distribution_of(seed):
        model = table_model.model_of(table_model.table(VOCAB, seed, 4))
        return lambda context: reference.to_probs(model(context), **params)

    return distribution_of(1000 + seed), distribution_of(seed)


def cases_of(rule, verification):
    """Returns the decided cases of a rule by the order of its tests."""
    tree = verification.tree
    nodes = range(1, len(tree.parents) + 1)
    if rule in ("match", "kseq"):
        return tree_enumeration.decided_by_walk(verification)
    order = {
        "block": reversed(nodes),
        "multipath": reversed(nodes),
        "traversal": tree.leaves_first(),
    }
    return tree_enumeration.decided(verification, order.get(rule, nodes))


def study(rule, tree, seed=0, verifier=None, pair=None, params=(), **options):
    """Returns the greatest error of a rule's law, and the mean number of emitted tokens.

    The mean of a sound rule is also compared with the one that its `accept_probs` say.
    """
    draft, target = pair or distributions(seed, **dict(params))
    verification = Verification(verifier or verifiers.by_name(rule), tree, draft, target, **options)
    distribution = tree_enumeration.emitted(verification, cases_of(rule, verification))
    length = max(map(len, distribution))
    joint = tree_enumeration.continued(distribution, target, length)
    mean = tree_enumeration.expected_length(distribution)
    errors = [abs(sum(distribution.values()) - 1)]
    if verifier is None:
        errors.append(abs(verification.mean_length() - mean))
    for text in itertools.product(range(len(target(()))), repeat=length):
        steps = (target(text[:size])[token] for size, token in enumerate(text))
        errors.append(abs(joint[text] - np.prod(list(steps))))
    return max(errors), mean


@functools.cache
def result(rule, tree, seed, distinct=False):
    """Returns the result of a study that several tests look at."""
    return study(rule, tree, seed, distinct=distinct)


@pytest.mark.parametrize("rule", ("rejection", "block", "traversal", "recursive"))
def test_rules_for_chains_are_lossless(rule):
    """Three pairs of distributions that depend on the context, over blocks of three."""
    for seed in range(3):
        error, _ = result(rule, CHAIN, seed)
        assert error < TOLERANCE, seed


@pytest.mark.parametrize("rule", ("rejection", "block", "traversal", "recursive"))
def test_greedy_and_filtered_chains_are_verified_losslessly(rule):
    for params in ({"temperature": 0.0}, *PARAMS):
        error, _ = study(rule, CHAIN, 2, params=params)
        assert error < TOLERANCE, params


@pytest.mark.parametrize("rule", ("rejection", "recursive", "match"))
def test_chain_without_some_tokens_is_verified_losslessly(rule):
    """Point masses; a chain that ends early; a token that the target never takes."""
    for tokens in ((0, 1, 2), (1, -1, -1), (-1, -1, -1)):
        error, _ = study(rule, CHAIN, 4, tokens=tokens)
        assert error < TOLERANCE, tokens


@pytest.mark.parametrize(("rule", "distinct"), SAMPLED)
@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_rules_for_trees_are_lossless(rule, distinct, tree):
    error, _ = result(rule, tree, 1, distinct)
    assert error < TOLERANCE


@pytest.mark.parametrize(("rule", "distinct"), SAMPLED[:-1])
def test_filtered_distributions_are_verified_losslessly(rule, distinct):
    """Filters give tokens of probability zero, and without replacement nothing may be left."""
    for tree, params in zip((branching(3), branching(2, 1)), PARAMS):
        error, _ = study(rule, tree, seed=2, distinct=distinct, params=params)
        assert error < TOLERANCE, tree


def test_typical_acceptance_has_the_draft_s_law():
    """Where no token is improbable, all drafts are accepted: the first token is the draft's."""
    draft, target = ([0.2, 0.5, 0.3], [0.5, 0.3, 0.2])
    pair = (lambda _: np.asarray(draft)), (lambda _: np.asarray(target))
    error, tokens = study("typical", branching(1), pair=pair)
    assert tokens == pytest.approx(2)
    assert error == pytest.approx(max(abs(a - b) for a, b in zip(draft, target)) * max(target))


@pytest.mark.parametrize("rule", ("recursive", "match"))
def test_chosen_tokens_are_verified_losslessly(rule):
    """Tokens that were not drawn are point masses; some are missing, twins or not eligible."""
    tree = Tree((0, 0, 0, 1, 1, 2))
    for tokens in ((0, 1, 2, 0, 2, 1), (1, 1, 0, 2, 0, 2), (2, -1, 0, 1, 1, 0)):
        eligible = np.asarray([True, True, tokens[0] != 1, True, tokens[0] != 2, True])
        error, _ = study(rule, tree, seed=3, tokens=tokens, eligible=eligible)
        assert error < TOLERANCE, tokens


@pytest.mark.parametrize("rule", ("recursive", "traversal", "kseq"))
def test_siblings_after_one_that_is_not_eligible_are_verified_losslessly(rule):
    """Without replacement they were drawn without its token, although it is not verified."""
    for tree, eligible in ((branching(3), (0, 1, 1)), (branching(2, 1), (0, 1, 1, 1))):
        options = {"distinct": rule != "kseq", "eligible": np.asarray(eligible, bool)}
        error, _ = study(rule, tree, seed=3, **options)
        assert error < TOLERANCE


def test_block_verification_emits_most_of_all_rules_for_chains():
    """It emits at least as much as rejection on every pair, and matching the least."""
    for seed in range(3):
        lengths = {rule: result(rule, CHAIN, seed)[1] for rule in ("match", "recursive", "block")}
        assert lengths["match"] <= lengths["recursive"] <= lengths["block"] + TOLERANCE
        assert result("traversal", CHAIN, seed)[1] == pytest.approx(lengths["block"], abs=TOLERANCE)


def test_block_verification_of_point_masses_and_greedy_rows_emits_as_much():
    for options in ({"tokens": (0, 1, 0)}, {"params": {"temperature": 0.0}}):
        lengths = [study(rule, CHAIN, 4, **options)[1] for rule in ("recursive", "block")]
        assert lengths[0] == pytest.approx(lengths[1], abs=TOLERANCE)


def test_published_example_of_block_verification():
    """10 / 9 and 11 / 9 accepted tokens of two (Sun et al. 2024, section 2)."""
    pair = (lambda context: np.array([2, 1]) / 3), (lambda context: np.array([1, 2]) / 3)
    for rule, accepted in (("recursive", 10 / 9), ("block", 11 / 9)):
        error, length = study(rule, branching(1, 1), pair=pair)
        assert error < TOLERANCE and length - 1 == pytest.approx(accepted, abs=TOLERANCE)


def test_paths_are_cut_off_where_the_shortest_ends():
    """Paths of two tokens, of which one has no second; and tokens that may not be accepted."""
    paths = Tree((0, 0, 1, 2))
    for eligible in ((1, 1, 0, 1), (0, 1, 1, 1), (0, 0, 1, 1)):
        options = {"eligible": np.asarray(eligible, bool)}
        error, length = study("multipath", paths, seed=3, **options)
        assert error < TOLERANCE and (length > 1.1) == any(eligible[:2])
    assert study("multipath", CHAIN, 2)[1] == pytest.approx(result("block", CHAIN, 2)[1])


@pytest.mark.parametrize("distinct", (False, True))
def test_traversal_emits_at_least_as_much_as_recursive_rejection(distinct):
    for seed in range(2):
        lengths = [
            result(rule, branching(2, 1), seed, distinct)[1] for rule in ("recursive", "traversal")
        ]
        assert lengths[0] <= lengths[1] + TOLERANCE


# Of each fault the rule and the tree that must show it, drawn without replacement if `distinct`.
BROKEN = read(r"""
verifiers/block.py
- block: residual of one token
    acceptance(weights, mass)
    'acceptance(weights, mass)\n    residual = jnp.maximum(target_probs_BMV - draft_probs, 0)'
    block 0-1-2
- block: first failure
    count = jnp.max(jnp.where(passes, jnp.arange(1, M), 0), axis=1, initial=0)
    count = jnp.sum(jnp.cumprod(passes, axis=1), axis=1)
    block 0-1-2
- block: weight as acceptance
    return mass_BM, mass_BM + (1 - weights_BM)
    return weights_BM, jnp.ones_like(weights_BM)
    block 0-1-2
verifiers/kseq.py
- kseq: divisor too small
    jnp.maximum(children, 1)))[1]
    jnp.maximum(children, 1)))[1] * 0.9
    kseq 0-0
- kseq: plain residual
    common * scale[..., None], 0)
    draft_probs, 0)
    kseq 0-0
verifiers/match.py
- match: a draw that is thrown away, and drawn again
    for array in (drawn_BM, mass_BM))
    for array in (jnp.roll(drawn_BM, 1, axis=1), mass_BM))
    match 0-0
- match: a draw per child
    proposal.tokens == jnp.take_along_axis(drawn_BM, parents, axis=1)
    proposal.tokens == drawn_BM[:, 1:]
    match 0-0-1-2
verifiers/multipath.py
- multipath: distribution of a single path
    '        nodes = paths[:, :, depth]'
    '        probs = draft\n        nodes = paths[:, :, depth]'
    multipath 0-0
- multipath: worst path
    best = jnp.argmin(jnp.where(alive, drawn_rank, V), axis=1)
    best = jnp.argmax(jnp.where(alive, drawn_rank, -1), axis=1)
    multipath 0-0
- multipath: better beginnings of this token alone
    better_BV = better_B[:, None] +
    better_BV = 0 * better_B[:, None] +
    multipath 0-0-1-2
verifiers/rejection.py
- rejection: draft of another temperature in the ratio
    jnp.take_along_axis(draft_probs, index
    jnp.take_along_axis(jax.nn.softmax(1.1 * jnp.log(draft_probs)), index
    rejection 0-1-2
- rejection: raw target in the ratio
    jnp.take_along_axis(target_probs, index
    jnp.take_along_axis(jax.nn.softmax(jnp.log(target_probs) / 2), index
    rejection 0-1-2
- rejection: swapped target and draft
    return jnp.where(draft_tokens >= 0, target_at, 0), lenience * draft_at
    return draft_at, lenience * target_at
    rejection 0-1-2
- rejection: epsilon in the ratio
    return jnp.where(draft_tokens >= 0, target_at, 0), lenience * draft_at
    return target_at, lenience * draft_at + 1e-9
    rejection 0-1-2
- rejection: residual by softmax
    return jnp.where(is_empty, target_probs, difference)
    return jnp.where(is_empty, target_probs, jax.nn.softmax(difference))
    rejection 0-1-2
- rejection: residual without the draft
    next_probs = residual(draft_at, target_at, lenience)
    next_probs = target_at
    rejection 0-1-2
- rejection: residual of the next position
    jnp.take_along_axis(target_probs_BMV, count_B[:, None, None], axis=1)
    jnp.take_along_axis(target_probs_BMV, jnp.minimum(count_B + 1, M - 1)[:, None, None], axis=1)
    rejection 0-1-2
- rejection: bonus token from a residual
    draft_at = jnp.where(rejected >= 0, draft_at, 0)
    draft_at = draft_at * 1
    rejection 0-1-2
- rejection: accepts everything
    count_B = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1, dtype=jnp.int32)
    count_B = jnp.full(len(accepted), K, jnp.int32)
    rejection 0-1-2
- rejection: continues after a rejection
    count_B = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1, dtype=jnp.int32)
    count_B = jnp.sum(accepted, axis=1, dtype=jnp.int32)
    rejection 0-1-2
verifiers/siblings.py
- recursive: draft not renormalised
    others = others / jnp.where(total == 0, 1, total)
    others = others * 1
    recursive 0-0-0 distinct
- recursive: draft with the rejected token
    others = jnp.where(is_token, 0, draft)
    others = draft
    recursive 0-0 distinct
- recursive: target not renormalised
    residual / jnp.where(mass == 0, 1, mass))
    residual)
    recursive 0-0
- recursive: target as it was
    targets = targets.at[parent].set(jnp.where(present, residual, target))
    targets = targets.at[parent].set(target)
    recursive 0-0
- traversal: weight of the parent
    whole = mass + (1 - weight)
    whole = mass * 0 + 1
    traversal 0-1-1 distinct
- traversal: weights of single tokens
    weights = weights.at[node].set(accept)
    weights = weights.at[node].set(accept / jnp.maximum(weight, 1e-3))
    traversal 0-0-1-2 distinct
""")


@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.fault)
def test_broken_rules_are_rejected(mutant, monkeypatch):
    """Enumeration rejects rules of which one line is wrong, as in published implementations."""
    rule, shape, *distinct = mutant.tests[0].split()
    tree = Tree(tuple(map(int, shape.split("-"))))
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    source = inspect.getsource(module)
    assert source.count(mutant.old) == 1
    faulty = types.ModuleType(module.__name__)
    code = compile(source.replace(mutant.old, mutant.new), module.__file__, "exec")
    exec(code, faulty.__dict__)
    if module is siblings:
        for user in (recursive, traversal):
            monkeypatch.setattr(user, "siblings", faulty)
        verifier = verifiers.by_name(rule)
    else:
        verifier = faulty.Verifier()
    tree_enumeration.verify_function.cache_clear()
    error, _ = study(rule, tree, seed=5, verifier=verifier, distinct=bool(distinct))
    tree_enumeration.verify_function.cache_clear()
    least = 10 * TOLERANCE if "epsilon" in mutant.fault else 1e-4
    assert error > least


def test_siblings_in_another_order_are_rejected():
    """Without replacement, children must be verified in the order in which they were drawn."""
    draft, target = distributions(6)
    verification = Verification(verifiers.by_name("recursive"), branching(2), draft, target, True)
    verification._tokens = np.sort(verification._tokens, axis=1)
    distribution = tree_enumeration.emitted(verification, cases_of("recursive", verification))
    joint = tree_enumeration.continued(distribution, target, 1)
    assert max(abs(joint[(token,)] - target(())[token]) for token in range(VOCAB)) > 1e-3
