"""Tests of the gated delta net against a recurrence in NumPy, one token after another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import delta_reference
from helpers.models import tiny_config
from helpers.numpy_models import drawn

from spsjax import tree
from spsjax.models import caches as kv
from spsjax.models import delta_rule, pure
from spsjax.models.context import context_of
from spsjax.models.delta import GatedDeltaNet
from spsjax.types import Block

CONFIG = tiny_config(
    48, mixer="delta", num_heads=4, num_kv_heads=2, head_dim=7, value_dim=5, delta_taps=3, d_model=8
)
# A model with a layer that has keys, which says how many slots a cache has.
MODEL = dataclasses.replace(
    tiny_config(48, num_layers=2, d_model=8),
    changes=(
        tuple((name, getattr(CONFIG, name)) for name in ("mixer", "num_heads", "num_kv_heads"))
        + tuple((name, getattr(CONFIG, name)) for name in ("head_dim", "value_dim", "delta_taps")),
        (),
    ),
)
RNG = np.random.default_rng(0)
BEFORE, NODES = 9, 8  # tokens before a block, and its nodes


@functools.cache
def weights():
    params = drawn(pure.param_shapes(GatedDeltaNet, CONFIG), 0, 0.7)
    for name in ("decay_rate", "decay_bias", "scale"):
        params[name] = RNG.normal(0.3, 0.5, params[name].shape).astype(np.float32)
    return params


def inputs(*shape):
    return RNG.normal(0, 1, (*shape, 8)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(size, params, x_BTD, state, block, ancestors):
    """Returns outputs and nodes of a pass; `size`: nodes of the block so far."""
    module = pure.bind(GatedDeltaNet, CONFIG, params, jnp.float32)
    positions = None if ancestors is None else jnp.zeros(x_BTD.shape[:2], jnp.int32)
    held = None
    if block is not None:
        shape = len(x_BTD), block.inputs[0].shape[2]
        filled = jnp.broadcast_to(jnp.arange(shape[1]) < size, shape)
        held = Block((block,), (None,), jnp.where(filled, 0, -1), jnp.int32(size))
    context = context_of(x_BTD.shape[1], None, held, positions, ancestors)
    context = dataclasses.replace(context, contiguous=ancestors is None)
    earlier = None if block is None else (block, None)
    outputs, (nodes, _) = module(x_BTD, context, state if state else (), earlier)
    return outputs, nodes


def zeros(shapes):
    """Returns NumPy arrays of these shapes, which compile nothing."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def empty_state(rows):
    def state():
        cache = kv.empty(kv.shapes(MODEL, rows, 4), jnp.float32)
        return kv.with_states(MODEL, cache, jnp.float32).keys[0]

    return zeros(jax.eval_shape(state))


def empty_nodes(rows, nodes):
    def block():
        block = kv.empty_block(kv.shapes(MODEL, rows, nodes), jnp.float32)
        return kv.with_nodes(MODEL, block, jnp.float32).keys[0]

    return zeros(jax.eval_shape(block))


@jax.jit
def after(state, nodes, path, counts):
    return state.after(nodes, path, counts)


def on_host(tree_of_arrays):
    return jax.tree.map(np.asarray, tree_of_arrays)


def expected(rows_BTD):
    """Returns the oracle's outputs and states of each row."""
    outputs, states = zip(*(delta_reference.layer(CONFIG, weights(), row) for row in rows_BTD))
    return np.stack(outputs), np.stack(states)


@pytest.mark.parametrize("tokens", [1, 7, 2 * delta_rule.CHUNK + 5])
def test_text_gives_the_outputs_of_the_recurrence(tokens):
    """One token, one triangular system, and several of them with padding."""
    x_BTD = inputs(2, tokens)
    outputs, nodes = run(0, weights(), x_BTD, None, None, None)
    right, states = expected(x_BTD)
    np.testing.assert_allclose(outputs, right, atol=1e-4)
    # The state of each row after as many tokens as it has.
    counts = np.asarray([tokens, tokens // 2])
    state = on_host(after(empty_state(2), nodes, None, counts))
    for row, count in enumerate(counts):
        last = states[row, count - 1] if count else np.zeros_like(states[0, 0])
        np.testing.assert_allclose(state.memory[row], last, atol=1e-5)


def tree_of_rows():
    """Returns different trees per row [3, N], one of them a chain, and the ancestors of nodes."""
    parents = np.asarray([[0, 0, 1, 1, 2, 5, 3], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 2, 2]])
    return parents, np.asarray(jax.jit(tree.ancestors)(parents))


@functools.cache
def scored():
    """Returns inputs, ancestors and the state before a block, then its outputs and its nodes."""
    before, x_BTD = inputs(3, BEFORE), inputs(3, NODES)
    _, above = tree_of_rows()
    _, nodes = run(0, weights(), before, None, None, None)
    state = after(empty_state(3), nodes, None, np.asarray([BEFORE, BEFORE - 2, 1]))
    outputs, nodes = run(0, weights(), x_BTD, state, None, above)
    return before, x_BTD, above, *on_host((state, outputs, nodes))


def path_inputs(row, node):
    """Returns the inputs of a row's committed tokens and of the path to a node."""
    before, x_BTD, above, *_ = scored()
    committed = before[row, : (BEFORE, BEFORE - 2, 1)[row]]
    return np.concatenate([committed, x_BTD[row, np.flatnonzero(above[row, node])]])


def test_every_node_of_a_tree_continues_its_ancestors():
    outputs = scored()[4]
    for row in range(3):
        for node in range(NODES):
            right, _ = delta_reference.layer(CONFIG, weights(), path_inputs(row, node))
            np.testing.assert_allclose(outputs[row, node], right[-1], atol=1e-4)


def test_levels_of_a_tree_give_what_one_pass_gives():
    """A block that grows: the first three nodes, two more, then the rest."""
    _, x_BTD, above, state, outputs, nodes = scored()
    block = empty_nodes(3, NODES)
    for start, stop in ((0, 3), (3, 5), (5, NODES)):
        now = x_BTD[:, start:stop], state, block, above[:, start:stop]
        new, block = run(start, weights(), *now)
        np.testing.assert_allclose(new, outputs[:, start:stop], atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), block, nodes)


@pytest.mark.parametrize("counts", [[4, 8, 3], [1, 5, 0], [0, 0, 2]])
def test_state_after_a_path_is_that_of_its_tokens(counts):
    """Rows accept paths of other lengths, none included. A window of inputs follows the path."""
    *_, state, _, nodes = scored()
    leaves = [6, 7, 5]  # at depths 3, 7 and 2
    parents, _ = tree_of_rows()
    path = np.asarray(jax.jit(tree.path_to)(parents, np.asarray(leaves)))
    moved = on_host(after(state, nodes, path, np.asarray(counts)))
    for row, count in enumerate(counts):
        count = min(count, int((path[row] >= 0).sum()))
        if not count:
            np.testing.assert_array_equal(moved.memory[row], state.memory[row])
            continue
        tokens = path_inputs(row, path[row, count - 1])
        _, states = delta_reference.layer(CONFIG, weights(), tokens)
        np.testing.assert_allclose(moved.memory[row], states[-1], atol=1e-5)
        # The next token reads the moved window, too.
        following = inputs(1, 1)
        output, _ = run(0, weights(), np.repeat(following, 3, axis=0), moved, None, None)
        right, _ = delta_reference.layer(CONFIG, weights(), np.concatenate([tokens, following[0]]))
        np.testing.assert_allclose(np.asarray(output)[row, 0], right[-1], atol=1e-4)


def test_token_that_is_not_finite_reaches_its_descendants_alone():
    _, x_BTD, above, state, outputs, _ = scored()
    broken = x_BTD.copy()
    broken[:, 1] = np.inf
    spoilt, nodes = run(0, weights(), broken, state, None, above)
    below = above[:, :, 1]
    assert np.isnan(np.asarray(spoilt)[below]).all() and below[:, 1].all() and not below.all()
    np.testing.assert_array_equal(np.asarray(spoilt)[~below], np.asarray(outputs)[~below])
    # Node 2 of row 0 is no descendant of node 1, and all nodes of row 1 are but the root.
    path = np.asarray([[0, 2, 5], [0, 1, 2], [0, 2, 6]])
    memory = np.asarray(after(state, nodes, path, np.asarray([3, 2, 3])).memory)
    assert np.isfinite(memory[[0, 2]]).all() and np.isnan(memory[1]).all()
