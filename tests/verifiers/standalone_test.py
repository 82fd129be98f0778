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


def arrays(seed=0, rows=2, vocab=5):
    """Returns tokens, parents and distributions of trees of four tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(vocab)[:4] for _ in range(rows)])
    draft, target = (rng.dirichlet(np.ones(vocab), (rows, nodes)) for nodes in (2, 5))
    return tokens, np.broadcast_to(PARENTS, tokens.shape), draft, target


def verify(method, *trees):
    """Returns the results of `tree_verify`, as arrays of NumPy."""
    result = spsjax.tree_verify(KEY, *trees, method, replacement=method == "kseq")
    return [np.asarray(array) for array in result]


@pytest.mark.parametrize("method", METHODS)
def test_result_is_a_path_of_the_tree(method):
    tokens, parents, draft, target = arrays(rows=50)
    emitted, number, path = verify(method, tokens, parents, draft, target)
    assert emitted.shape == path.shape == (50, 3) and {1, 2, 3} == set(number.tolist())
    for row in range(50):
        nodes = path[row, : number[row]].tolist()
        assert nodes[0] == 0 and (path[row, number[row] :] == -1).all()
        assert [PARENTS[node - 1] for node in nodes[1:]] == nodes[:-1]
        assert emitted[row, : number[row] - 1].tolist() == [tokens[row, n - 1] for n in nodes[1:]]
        assert emitted[row, number[row] - 1] >= 0 and (emitted[row, number[row] :] == -1).all()


@pytest.mark.parametrize("method", METHODS)
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
def test_rows_with_nan_emit_nothing(method):
    tokens, parents, draft, target = arrays(3, rows=3)
    target[0, 4, 2] = draft[1, 1, 0] = np.nan  # matching does not look at the draft
    emitted, number, path = verify(method, tokens, parents, draft, target)
    bad = [True, method != "match", False]
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
    thirds = np.full((3000, 3), 1 / 3)
    tokens = np.arange(9000).reshape(3000, 3) % 3
    draft = jnp.asarray(np.stack([thirds] * 3, axis=1), jnp.bfloat16)  # sums to 1.002
    target = np.stack([thirds] * 4, axis=1)
    assert spsjax.block_verify(KEY, tokens, draft, target)[1].min() >= 1
    chain = np.broadcast_to([0, 1, 2], tokens.shape)
    for method in METHODS:
        assert verify(method, tokens, chain, draft, target)[1].min() >= 1


def test_tree_without_tokens_emits_a_token_of_the_target():
    target = np.asarray([[[0.0, 1.0]]])
    for method in METHODS:
        trees = np.zeros((1, 0), int), np.zeros((1, 0), int), np.zeros((1, 0, 2)), target
        emitted, number, path = verify(method, *trees)
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
    draft, target = rng.dirichlet(np.ones(4), (300, 3)), rng.dirichlet(np.ones(4), (300, 4))
    drafts = np.stack([[rng.choice(4, p=probs) for probs in row] for row in draft])
    for count in (1, 3):
        chain = drafts[:, :count], draft[:, :count], target[:, : count + 1]
        one, other = spsjax.rejection_sample(KEY, *chain), spsjax.block_verify(KEY, *chain)
        assert one[0].shape == other[0].shape == (300, count + 1)
        assert np.array_equal(one[0], other[0]) == (count == 1)
    assert np.mean(other[1]) > np.mean(one[1])
    target[7, 2] = np.nan
    tokens, number = spsjax.block_verify(KEY, drafts, draft, target)
    assert number[7] == 0 and (tokens[7] == -1).all() and (np.delete(number, 7) > 0).all()
    with one_line("draft_probs", "[300, 3, 4]"):
        spsjax.block_verify(KEY, drafts, draft[:, :2], target)


def test_arguments_that_do_not_fit_are_refused():
    tokens, parents, draft, target = arrays(6)
    twins = np.where(np.arange(4) == 1, tokens[:, :1], tokens)
    for fragments, trees in (
        (("parents", "before its child", "found 1"), (tokens, parents + 1, draft, target)),
        (("parents", "below 2", "found 2"), (tokens, [[0, 0, 2, 2]] * 2, draft, target)),
        (("parents", "before its child", "-1"), (tokens, parents - 1, draft, target)),
        (("parents", "integers [2, 4]", "float"), (tokens, parents * 1.0, draft, target)),
        (("parents", "integers [2, 4]"), (tokens, parents[:, :3], draft, target)),
        (("tokens", "[-1, 5)", "found 5"), (tokens + 5 - tokens.max(), parents, draft, target)),
        (("tokens", "integers [B, N]"), (tokens[0], parents, draft, target)),
        (("tokens", "replacement=True"), (twins, parents, draft, target)),
        (("target_probs", "[2, 5, 5]"), (tokens, parents, draft, target[:, :4])),
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
