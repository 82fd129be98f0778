"""Functions of one round on proposals made by hand: sizes of the scoring pass, and `commit`."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax import decode, tree
from spsjax.drafters import none
from spsjax.models import caches as kv
from spsjax.types import Block, ModelOutput, Proposal, Round, Verdict
from spsjax.verifiers import match

ROWS, K, N, V, END = 3, 3, 5, 4, 9
SIZES = 0, 2, 4, 5
RNG = np.random.default_rng(0)
# A number per node, never zero, so that padding differs from nodes.
FEATURES = RNG.uniform(1, 2, (ROWS, N + 1, 2)).astype(np.float32)
DRAWN = RNG.integers(0, 2, (ROWS, N + 1))


def judge(proposal):
    """Returns an output and a verdict that depend on every field of the proposal."""
    nodes = proposal.tokens.shape[1] + 1
    chain = proposal.parents is None
    parents = tree.chain(ROWS, nodes - 1) if chain else proposal.parents
    features = jnp.asarray(FEATURES)[:, :nodes]
    depths = tree.depths(parents)
    held = features[:, None]
    block = Block((held,), (2 * held,), depths + 1, jnp.int32(nodes))
    # A chain has a distribution per token, and a tree one per node.
    assert proposal.probs.shape == (ROWS, nodes - chain, V)
    logits = proposal.probs if not chain else jnp.pad(proposal.probs, ((0, 0), (0, 1), (0, 0)))
    output = ModelOutput(logits + 1, features, (3 * features, features + depths[..., None]), block)
    return output, match.walk(proposal, jnp.asarray(DRAWN)[:, :nodes], jnp.ones((ROWS, nodes)))


def proposal_of(kind):
    """Returns a proposal of N likely tokens per row."""
    tokens = RNG.integers(0, 2, (ROWS, N), np.int32)
    probs = RNG.random((ROWS, N + 1, V), np.float32)
    if kind == "chain":
        # In a chain of N > K nodes nothing beyond K may be accepted.
        eligible = np.broadcast_to(np.arange(N) < K, (ROWS, N))
        return Proposal(tokens, probs[:, :N], None, eligible)
    parents = RNG.integers(0, np.arange(N) // 2 + 1, (ROWS, N), np.int32)
    depths = np.zeros((ROWS, N + 1), int)
    for node in range(N):
        depths[:, node + 1] = 1 + depths[np.arange(ROWS), parents[:, node]]
    eligible = (depths[:, 1:] <= K) & (RNG.random((ROWS, N)) < 0.8)
    return Proposal(tokens, probs, parents, eligible)


@pytest.mark.parametrize("kind", ("chain", "tree"))
def test_smallest_size_gives_what_the_whole_pass_gives(kind):
    """Padding is zeros, with positions of -1. Rows that are done do not count."""
    drafter = types.SimpleNamespace(num_speculative_tokens=K, score_sizes=SIZES)
    program = types.SimpleNamespace(drafter=drafter, schedule=None)
    smallest = jax.jit(lambda *args: decode.sizes.at_smallest_size(program, *args, judge))
    whole, lengths, accepted = jax.jit(judge), set(), 0
    for used in range(N + 1):
        proposal = proposal_of(kind)
        # Row 0 has `used` tokens, row 1 fewer; row 2 is done and has all.
        counts = np.asarray([[used], [used // 2], [N]])
        tokens = np.where(np.arange(N) < counts, proposal.tokens, -1)
        proposal = Proposal(tokens, proposal.probs, proposal.parents, proposal.eligible)
        done = np.asarray([False, False, True])
        output, verdict = jax.tree.map(np.asarray, smallest(done, proposal))
        expected, right = jax.tree.map(np.asarray, whole(proposal))
        size = min(size for size in SIZES if size >= used)
        for leaf, other, padding in (
            (output.hidden, expected.hidden, 0),
            *((tap, other, 0) for tap, other in zip(output.taps, expected.taps)),
            (output.block.positions, expected.block.positions, -1),
        ):
            np.testing.assert_array_equal(leaf[:, : size + 1], other[:, : size + 1])
            assert leaf.shape == other.shape and np.all(leaf[:, size + 1 :] == padding)
        held = output.block.keys[0], output.block.values[0]
        for leaf, other in zip(held, (expected.block.keys[0], expected.block.values[0])):
            np.testing.assert_array_equal(leaf[:, :, : size + 1], other[:, :, : size + 1])
            assert leaf.shape == other.shape and not np.any(leaf[:, :, size + 1 :])
        np.testing.assert_array_equal(output.logits[:, :size], expected.logits[:, :size])
        for name in ("tokens", "path"):
            fitted = getattr(right, name)[:2, : K + 1]
            np.testing.assert_array_equal(getattr(verdict, name)[:2], fitted)
        np.testing.assert_array_equal(verdict.num_tokens[:2], right.num_tokens[:2])
        lengths.add(size)
        accepted += int(right.num_tokens[:2].sum()) - 2
    assert lengths == {*SIZES} and accepted > 2


@jax.jit
def committed(proposal, verdict, done, room):
    """Returns the state after `commit`, of rows with 4 tokens and room for some more."""
    batch, slots = len(done), 16
    nodes = proposal.tokens.shape[1] + 1
    lengths, zeros = jnp.full(batch, 4), jnp.zeros(batch, jnp.int32)
    state = decode.DecodeState(
        tokens=jnp.zeros((batch, slots), jnp.int32),
        lengths=lengths,
        done=done,
        cache=kv.empty([((batch, 1, slots, 2),) * 2], jnp.float32).at(lengths - 1),
        drafter=(),
        history=(),
        rows=None,
        limits=lengths + room,
        keys=None,
        failed=jnp.zeros(batch, bool),
        rounds=zeros,
        proposed=zeros,
        accepted=jnp.zeros((batch, nodes), jnp.int32),
    )
    held = jnp.zeros((batch, 1, nodes, 2))
    block = Block((held,), (held,), jnp.zeros((batch, nodes), jnp.int32), jnp.int32(nodes))
    output = ModelOutput(None, jnp.zeros((batch, nodes, 1)), (), block)
    program = decode.Program(None, none.Drafter(), None, (END,))
    now = Round(state.tokens, state.lengths, None, None, None)
    return decode.step.commit(program, {}, state, now, proposal, output, verdict)


def test_commit_counts_the_tokens_that_may_be_accepted():
    """Holes, tokens that are not eligible and rows that are done add nothing to `proposed`."""
    tokens = np.asarray([[4, -1, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7]])
    eligible = np.asarray([[1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
    parents, nothing = np.asarray([[0, 0, 1, 1]] * 3), np.asarray([[0, -1, -1, -1, -1]] * 3)
    verdict = Verdict(np.where(nothing == 0, 8, -1), np.ones(3, int), nothing, np.ones(3, bool))
    done, room = np.asarray([False, False, True]), np.full(3, 9)
    state = committed(Proposal(tokens, None, parents, eligible), verdict, done, room)
    state = jax.tree.map(np.asarray, state)
    assert state.proposed.tolist() == [2, 4, 0] and state.rounds.tolist() == [1, 1, 0]
    assert state.accepted[:, 0].tolist() == [1, 1, 0] and not np.any(state.accepted[:, 1:])
    everything = committed(Proposal(tokens, None), verdict, done, room)
    assert everything.proposed.tolist() == [3, 4, 0]


def test_commit_ignores_nan_after_the_end_of_a_text():
    """A position that is not finite fails a row only if its text goes on there."""
    # An accepted end of sequence; none; none within the limit; a row that is done.
    tokens = np.asarray([[3, END, -1], [3, 4, -1], [3, END, -1], [3, 4, -1]])
    path = np.asarray([[0, 1, 2]] * 4)
    verdict = Verdict(tokens, np.full(4, 2), path, np.zeros(4, bool))
    proposal = Proposal(tokens[:, :2], None)
    done, room = np.asarray([False, False, False, True]), np.asarray([9, 9, 1, 9])
    state = jax.tree.map(np.asarray, committed(proposal, verdict, done, room))
    assert state.failed.tolist() == [False, True, False, False]
    assert state.done.all() and state.lengths.tolist() == [6, 6, 5, 4]
    assert state.tokens[0, 4:6].tolist() == [3, END]
    assert state.accepted.tolist() == [[0, 0, 1]] * 3 + [[0, 0, 0]]
