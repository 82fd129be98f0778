"""Verifiers by name, what they refuse, and trees of the draft model in the loop."""

import jax
import numpy as np
import pytest
from helpers import drafting, reference
from helpers.bad_input import one_line
from helpers.calls import Call
from helpers.models import logits_of
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model
from helpers.verdicts import verdict_of

import spsjax
from spsjax import decode, loading, sampling, verifiers
from spsjax.drafters import draft_model, ngram, shapes
from spsjax.loading import LoadedDrafter

PROMPTS = [[1, 2, 3], [4]]
TREES = shapes.Tree.branching(2, 2), shapes.DynamicTree(6, depth=3, width=2)


@pytest.fixture(scope="module")
def pair():
    target = numpy_spread_model(16)
    return target, numpy_nearby_model(target)


def trees_of(draft: loading.Model, tree) -> LoadedDrafter:
    return LoadedDrafter("tree", draft_model.Drafter(draft.config, tree=tree), draft.params)


def generate(target, drafter, verifier, K=None):
    """Generates greedily."""
    options = {"sampling": spsjax.SamplingParams(0.0), "max_new_tokens": 12, "stop_at_eos": False}
    return spsjax.generate(target, PROMPTS, drafter, K, verifier=verifier, **options)


@jax.jit
def greedy_verdicts(keys, proposal, target):
    return {
        name: verifiers.by_name(name).verify(keys, proposal, target) for name in verifiers.NAMES
    }


@pytest.mark.slow
def test_every_rule_takes_the_targets_choices_in_greedy_rows():
    """Typical and top-k acceptance, too: a chain is accepted as far as the target agrees.

    Rows without a draft token are rows of plain decoding.
    """
    rng, identity = np.random.default_rng(0), np.eye(3, dtype=np.float32)
    best, tokens = rng.integers(0, 2, (64, 4)), rng.integers(0, 2, (64, 3))
    tokens[:4] = -1
    probs = rng.dirichlet(np.ones(3), (64, 3)).astype(np.float32)
    keys = np.zeros((64, 2), np.uint32)
    proposal = spsjax.Proposal(tokens, probs)
    verdicts = greedy_verdicts(jax.random.wrap_key_data(keys), proposal, identity[best])
    accepted = np.cumprod(tokens == best[:, :3], axis=1).sum(axis=1)
    assert set(accepted) == {0, 1, 2, 3}
    expected = np.where(np.arange(4) <= accepted[:, None], best, -1)
    for name, verdict in verdicts.items():
        np.testing.assert_array_equal(verdict.tokens, expected, err_msg=name)


def test_rules_report_a_root_that_is_not_finite():
    """Nothing can be drawn there, and the row is not valid."""
    probs = np.full((2, 3, 4), 0.25, np.float32)
    target = probs.copy()
    target[0, 0, 1] = np.nan
    proposal = spsjax.Proposal(np.asarray([[1, 2], [1, 2]]), probs[:, :2])

    @jax.jit
    def valid(proposal, target):
        keys = sampling.row_keys(jax.random.key(0), 2)
        rules = map(verifiers.by_name, verifiers.NAMES)
        return [rule.verify(keys, proposal, target).valid for rule in rules]

    for name, rows in zip(verifiers.NAMES, valid(proposal, target), strict=True):
        assert rows.tolist() == [False, True], name


@pytest.mark.parametrize("name", ("kseq", "multipath"))
@pytest.mark.parametrize("children", (24,))
def test_one_right_child_of_many_is_accepted(name, children):
    """A greedy target and a draft that is nearly sure of it; in float32 all shares round to 1."""
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(100)[:children] for _ in range(300)])
    right = tokens[np.arange(300), np.arange(300) % 20]
    target = np.zeros((300, children + 1, 100), np.float32)
    target[:, 1:, 0] = target[np.arange(300), 0, right] = 1
    draft = 0.1 * rng.dirichlet(np.full(100, 0.3), 300) + 0.9 * target[:, 0]
    draft, parents = np.float32(draft[:, None]), np.zeros(tokens.shape, np.int32)
    proposal = spsjax.Proposal(tokens, draft, parents)
    verdict = verdict_of(verifiers.by_name(name), proposal, target)
    assert verdict.valid.all()
    np.testing.assert_array_equal(verdict.tokens[:, 0], right)


def test_typical_acceptance_takes_the_most_probable_of_the_longest_paths():
    """exp(-entropy) is 0.5 at the root and 1 below it; the last child is of no typical node."""
    target = np.full((1, 7, 4), [0, 1, 0, 0], np.float32)
    target[0, 0] = [0.5, 0.5, 0, 0]
    target[0, 1] = [0.05, 0.95, 0, 0]
    target[0, 2] = [0.15, 0.85, 0, 0]
    #        root: 0, 1, 2; below 0: 0; below 1: 0; below 2: 1
    tokens, parents = [[0, 1, 2, 0, 0, 1]], [[0, 0, 0, 1, 2, 3]]
    proposal = spsjax.Proposal(np.asarray(tokens), None, np.asarray(parents))

    def path(**fields):
        rule = verifiers.typical.Verifier(**fields)
        return verdict_of(rule, proposal, target).path[0].tolist()

    assert path() == [0, 2, 5, -1, -1, -1, -1]  # 0.15 is above 0.09, 0.05 is not
    assert path(epsilon=0.01) == [0, 2, 5, -1, -1, -1, -1]  # both are: 0.5 x 0.15 is more
    assert path(epsilon=0.2) == [0, 1, -1, -1, -1, -1, -1]  # neither is: the first child
    assert path(epsilon=0.2, delta=0.1) == [0, 2, 5, -1, -1, -1, -1]  # 0.1 exp(-0.42) = 0.065


@pytest.mark.parametrize("k", (1, 2, 9))
def test_top_k_acceptance_by_hand(k):
    """The first token is the draft's if it is one of the target's k best, else the target's."""
    draft, target = np.asarray([0.2, 0.5, 0.3, 0.0]), np.asarray([0.3, 0.5, 0.2, 0.0])
    good = np.asarray([2, 1, 3, 99]) <= k  # the last one is impossible
    rule, rows = verifiers.top_k.Verifier(k), 4 * 4000
    tokens = np.tile(np.arange(4, dtype=np.int32), 4000)[:, None]
    proposal = spsjax.Proposal(tokens, np.tile(np.float32(draft), (rows, 1, 1)))
    probs = np.tile(np.float32(target), (rows, 2, 1))
    accept = np.asarray(jax.jit(rule.accept_probs)(proposal, probs))
    np.testing.assert_array_equal(accept[:4, 0], good)
    first = verdict_of(rule, proposal, probs, seed=k).tokens[:, 0]
    weights = np.tile(draft, 4000) / 4000
    expected = np.where(good, draft, 0) + draft[~good].sum() * target
    np.testing.assert_allclose(np.bincount(first, weights, 4), expected, atol=0.03)


def proposal_of(target, drafter: LoadedDrafter) -> spsjax.Proposal:
    """Returns shapes and kind of what a drafter proposes; it is traced, but not compiled."""
    program = decode.Program(target.config, drafter.drafter, verifiers.match.Verifier())
    texts = np.ones((2, 4), np.int32), np.full(2, 4, np.int32)

    def propose(params):
        return drafting.proposed_after(program, params, *texts, 32)

    return jax.eval_shape(propose, drafter.with_target(target.params))


def test_rules_that_do_not_fit_are_refused_in_one_line(pair):
    target, draft = pair
    for drafter, name, message in (
        (draft, "blocks", "verifier: expected block, kseq, match"),
        (draft, 3, "verifier: expected block, kseq, match"),
        (trees_of(draft, TREES[0]), "block", "verifier: expected a rule for trees"),
    ):
        with one_line(message):
            generate(target, drafter, name)
    distinct, dynamic = (proposal_of(target, trees_of(draft, tree)) for tree in TREES)
    matches = proposal_of(target, LoadedDrafter("ngram", ngram.Drafter(2), None))
    for proposal, name, message in (
        (distinct, "rejection", "verifier: expected a rule for trees"),
        (distinct, "kseq", "children without replacement"),
        (distinct, "multipath", "children without replacement"),
        (dynamic, "traversal", "found one of point masses"),
        (matches, "kseq", "found one of point masses"),
        (matches, "multipath", "found one of point masses"),
    ):
        with one_line(message):
            verifiers.by_name(name).check(proposal)


def test_trees_are_loaded_with_a_draft_and_verified_by_default():
    target = spsjax.load("pystdlib/target")
    loaded = spsjax.load_drafter("pystdlib/draft", target, tree=TREES[0])
    assert loaded.drafter.tree == TREES[0]
    request = Call(target, [[1]], loaded)
    assert request.program.verifier == verifiers.recursive.Verifier()
    for name, tree in (("pystdlib/draft", (0, 0)), ("ngram", TREES[0]), ("pystdlib/draft", 3)):
        with pytest.raises(spsjax.InputError, match=r"^tree: expected"):
            spsjax.load_drafter(name, target, tree=tree)


def test_trees_that_cannot_be_are_refused(pair):
    _, draft = pair
    for parents in ((), (1,), (0, 2), (0, 1, 0), [0], (0, True)):
        with pytest.raises(spsjax.InputError, match=r"^parents: expected"):
            shapes.Tree(parents)
    with pytest.raises(spsjax.InputError, match=r"^replacement: expected True or False"):
        shapes.Tree((0, 0), "no")
    with pytest.raises(spsjax.InputError, match=r"^tree: expected at most 16 children of a node"):
        draft_model.Drafter(draft.config, tree=shapes.DynamicTree(width=20))
    with pytest.raises(spsjax.InputError, match=r"^num_nodes: expected at most 6"):
        shapes.DynamicTree(7, 2, 2)
    with pytest.raises(spsjax.InputError, match=r"^num_speculative_tokens: expected the depth"):
        draft_model.Drafter(draft.config, 3, tree=TREES[0])
    for field in ({"epsilon": 0.0}, {"epsilon": 2}, {"delta": -1}, {"delta": True}):
        with pytest.raises(spsjax.InputError, match=r"^(epsilon|delta): expected a number"):
            verifiers.typical.Verifier(**field)
    with pytest.raises(spsjax.InputError, match=r"^k: expected an integer >= 1"):
        verifiers.top_k.Verifier(0)


@pytest.mark.parametrize(("depth", "nodes"), [(2, 5)])
def test_dynamic_tree_keeps_the_most_probable_paths(pair, depth, nodes):
    """Compared with the same search over whole contexts, without a cache."""
    target, draft = pair
    tree = shapes.DynamicTree(num_nodes=nodes, depth=depth, width=3)
    proposal = spsjax.propose(target, [1, 2, 3], trees_of(draft, tree))
    paths, logits = drafting.paths(proposal), logits_of(draft)

    def children(path, score):
        logs = np.log(reference.to_probs(logits((1, 2, 3, *path))))
        return {(*path, int(token)): score + logs[token] for token in np.argsort(-logs)[:3]}

    level, scores = {(): 0.0}, {}
    for _ in range(depth):
        actual = {}
        for path in sorted(level, key=level.get, reverse=True)[:3]:
            actual |= children(path, level[path])
        level, scores = actual, scores | actual
    assert {*paths[1:]} == {*sorted(scores, key=scores.get, reverse=True)[:nodes]}


@pytest.mark.slow
def test_draft_of_two_layers_continues_as_it_would_alone():
    """The second layer of the last but one token depends on what that token sees."""
    target = numpy_spread_model(16)
    draft = numpy_spread_model(16, seed=3, num_layers=2)
    greedy, text, logits = spsjax.SamplingParams(0.0), [1, 2, 3], logits_of(draft)
    while len(text) < 9:
        text.append(int(np.argmax(logits(text))))
    for size in (3, 6):
        with drafting.small_programs():
            proposal = spsjax.propose(target, text[:size], draft, 3, greedy)
        assert proposal.tokens[0].tolist() == text[size : size + 3]
