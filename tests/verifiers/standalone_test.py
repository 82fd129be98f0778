"""Public functions for other people's distributions: `block_verify` and `tree_verify`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bad_input import one_line

import spsjax

METHODS = "match", "recursive", "traversal", "kseq"
KEY = jax.random.key(0)
PARENTS = [0, 0, 1, 1]
ROWS, VOCAB = 2000, 5


def arrays(seed=0):
    """Returns tokens, parents and distributions of trees; the last node has none of the draft."""
    rng = np.random.default_rng(seed)
    tokens = rng.permuted(np.tile(np.arange(VOCAB), (ROWS, 1)), axis=1)[:, :4]
    draft, target = (rng.dirichlet(np.ones(VOCAB), (ROWS, nodes)) for nodes in (4, 5))
    return tokens, np.broadcast_to(PARENTS, tokens.shape), draft, target


def verify(method, *trees):
    """Returns the results of `tree_verify`, as arrays of NumPy."""
    result = spsjax.tree_verify(KEY, *trees, method, replacement=method == "kseq")
    return [np.asarray(array) for array in result]


@pytest.mark.parametrize("method", METHODS)
def test_result_is_a_path_of_the_tree(method):
    tokens, parents, draft, target = arrays()
    emitted, number, path = verify(method, tokens, parents, draft, target)
    assert emitted.shape == path.shape == (ROWS, 3) and {1, 2, 3} == set(number.tolist())
    for row in range(50):
        nodes = path[row, : number[row]].tolist()
        assert nodes[0] == 0 and (path[row, number[row] :] == -1).all()
        assert [PARENTS[node - 1] for node in nodes[1:]] == nodes[:-1]
        assert emitted[row, : number[row] - 1].tolist() == [tokens[row, n - 1] for n in nodes[1:]]
        assert emitted[row, number[row] - 1] >= 0 and (emitted[row, number[row] :] == -1).all()


@pytest.mark.parametrize(
    "method",
    [
        name if name == "recursive" else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
    ],
)
def test_result_is_the_same_under_jit(method):
    """There the depth of the tree is not known, and the columns are those of a chain."""
    trees = arrays(1)
    options = {"method": method, "replacement": method == "kseq"}
    traced = jax.jit(lambda *trees: spsjax.tree_verify(KEY, *trees, **options))(*trees)
    for known, padded in zip(verify(method, *trees), traced):
        padded = np.asarray(padded)
        assert padded.ndim == 1 or (padded[:, 3:] == -1).all()
        np.testing.assert_array_equal(known, padded if known.ndim == 1 else padded[:, :3])


@pytest.mark.parametrize("method", METHODS)
def test_distributions_of_absent_tokens_may_be_anything(method):
    """Neither what follows an absent token matters, nor what it was drawn from."""
    tokens, parents, draft, target = arrays(2)
    tokens[:, [0, 2, 3]] = -1
    expected = verify(method, tokens, parents, draft, target)
    target[:, [1, 3, 4]], draft[:, 1] = np.nan, 7.0
    for known, other in zip(expected, verify(method, tokens, parents, draft, target)):
        np.testing.assert_array_equal(known, other)


@pytest.mark.parametrize("method", METHODS)
def test_rows_may_have_trees_of_other_shapes(method):
    tokens, parents, draft, target = arrays(4)
    other = np.broadcast_to([0, 0, 2, 2], parents.shape)
    odd = np.arange(ROWS) % 2 == 1
    mixed = np.where(odd[:, None], other, parents)
    results = [verify(method, tokens, shape, draft, target) for shape in (mixed, parents, other)]
    for both, one, another in zip(*results):
        np.testing.assert_array_equal(both[odd], another[odd])
        np.testing.assert_array_equal(both[~odd], one[~odd])


@pytest.mark.parametrize("method", METHODS)
def test_rows_with_nan_emit_nothing(method):
    tokens, parents, draft, target = arrays(3)
    target[0, 4, 2] = draft[1, 1, 0] = np.nan  # matching does not look at the draft
    emitted, number, path = verify(method, tokens, parents, draft, target)
    bad = [True, method != "match"] + [False] * (ROWS - 2)
    assert (number == 0).tolist() == bad
    assert (emitted[bad] == -1).all() and (path[bad] == -1).all()


@pytest.mark.parametrize("method", METHODS)
def test_tokens_below_an_absent_one_are_absent(method):
    """The second token's distributions are those of a context that does not exist."""
    tokens, parents, draft, target = arrays(2)
    tokens[:, 0], tokens[:, 1] = -1, 3
    expected = verify(method, tokens, parents, draft, target)
    assert expected[2].max() == 2
    target[:, 3:], draft[:, 1] = np.nan, 0.0
    for known, other in zip(expected, verify(method, tokens, parents, draft, target)):
        np.testing.assert_array_equal(known, other)


def test_rounded_distributions_emit_a_token():
    """Where draft and target agree to rounding, nothing may be left of the target."""
    target = np.full((ROWS, 5, VOCAB), 1 / VOCAB)
    tokens = np.random.default_rng(7).integers(0, VOCAB, (ROWS, 4))
    draft = target[:, :4].astype(jnp.bfloat16)  # sums to 1.001
    assert np.asarray(spsjax.block_verify(KEY, tokens, draft, target)[1]).min() >= 1
    chain = np.broadcast_to([0, 1, 2, 3], tokens.shape)
    for method in METHODS:
        assert verify(method, tokens, chain, draft, target)[1].min() >= 1


def test_tree_without_tokens_emits_a_token_of_the_target():
    target = np.asarray([[[0.0, 1.0]]])
    trees = np.zeros((1, 0), int), np.zeros((1, 0), int), np.zeros((1, 0, 2)), target

    @jax.jit
    def verified(trees):
        return [
            spsjax.tree_verify(KEY, *trees, method, replacement=method == "kseq")
            for method in METHODS
        ]

    for emitted, number, path in verified(trees):
        assert (emitted.tolist(), number.tolist(), path.tolist()) == ([[1]], [1], [[0]])


def test_chosen_tokens_need_no_distributions():
    tokens, parents, _, target = arrays(4)
    for method in ("match", "recursive"):
        assert verify(method, tokens, parents, None, target)[1].min() >= 1
    for method in ("traversal", "kseq"):
        with one_line("draft_probs", method, 'method="match"'):
            verify(method, tokens, parents, None, target)


def test_block_verify_takes_and_returns_what_rejection_sample_does():
    """Both emit the same for one token; for several, a block can end later."""
    rng = np.random.default_rng(5)
    draft, target = (rng.dirichlet(np.ones(VOCAB), (ROWS, nodes)) for nodes in (4, 5))
    drafts = (draft.cumsum(axis=-1) < rng.random((ROWS, 4, 1))).sum(axis=-1)
    drafts = np.minimum(drafts, VOCAB - 1)
    for count in (1, 4):
        chain = np.where(np.arange(4) < count, drafts, -1), draft, target
        one, other = (
            jax.device_get(function(KEY, *chain))
            for function in (spsjax.rejection_sample, spsjax.block_verify)
        )
        assert one[0].shape == other[0].shape == (ROWS, 5)
        assert np.array_equal(one[0], other[0]) == (count == 1)
    assert np.mean(other[1]) > np.mean(one[1])
    target[7, 2] = np.nan
    tokens, number = jax.device_get(spsjax.block_verify(KEY, drafts, draft, target))
    assert number[7] == 0 and (tokens[7] == -1).all() and (np.delete(number, 7) > 0).all()
    with one_line("draft_probs", f"[{ROWS}, 4, {VOCAB}]"):
        spsjax.block_verify(KEY, drafts, draft[:, :2], target)


def test_arguments_that_do_not_fit_are_refused():
    tokens, parents, draft, target = arrays(6)
    twins = np.where(np.arange(4) == 1, tokens[:, :1], tokens)
    for fragments, trees in (
        (("parents", "before its child", "found 1"), (tokens, parents + 1, draft, target)),
        (("parents", "below 2", "found 2"), (tokens, parents * 2, draft[:, :2], target)),
        (("parents", "before its child", "-1"), (tokens, parents - 1, draft, target)),
        (("parents", f"integers [{ROWS}, 4]", "float"), (tokens, parents * 1.0, draft, target)),
        (("parents", f"integers [{ROWS}, 4]"), (tokens, parents[:, :3], draft, target)),
        (("tokens", "[-1, 5)", "found 5"), (tokens + 5 - tokens.max(), parents, draft, target)),
        (("tokens", "integers [B, N]"), (tokens[0], parents, draft, target)),
        (("tokens", "replacement=True"), (twins, parents, draft, target)),
        (("target_probs", f"[{ROWS}, 5, 5]"), (tokens, parents, draft, target[:, :4])),
        (("target_probs",), (tokens, parents, draft, None)),
        (("draft_probs", "[B, P, V]"), (tokens, parents * 0, draft[0], target)),
        (("draft_probs",), (tokens, parents, [[[1.0], [0.5, 0.5]]], target)),
        (("draft_probs", "sum to 1", "at [0, 0]"), (tokens, parents, draft * 2, target)),
    ):
        with one_line(*fragments):
            verify("recursive", *trees)
    for method in ("block", "", None, ["match"]):
        with one_line("method", "match, recursive, traversal, kseq"):
            spsjax.tree_verify(KEY, tokens, parents, draft, target, method)
    with one_line("replacement", "kseq"):
        spsjax.tree_verify(KEY, tokens, parents, draft, target, "kseq")
    with one_line("replacement", "True or False"):
        spsjax.tree_verify(KEY, tokens, parents, draft, target, "match", 1)
    with one_line("key"):
        spsjax.tree_verify(0, tokens, parents, draft, target)
    assert verify("kseq", twins, parents, draft, target)[1].min() >= 1
    half = jnp.bfloat16
    assert verify("match", tokens, parents, draft.astype(half), target.astype(half))[1].min() >= 1
