"""Drafts of the target's features: chains and trees, compared with what training computes.

`unrolled`, which training runs, is the oracle. It has no cache, no blocks and no trees.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting, reference
from helpers.calls import padded
from helpers.models import FAMILIES, spread_model, tiny_config
from helpers.numpy_models import numpy_spread_model

from spsjax import DynamicTree, SamplingParams, Tree, decode, sampling
from spsjax.drafters import sparse_self
from spsjax.models import transformer
from spsjax.types import Proposal, Verdict
from spsjax.utils.compilation import compiled
from spsjax.verifiers import match

K, SLOTS, WIDTH, ROWS = 3, 32, 16, 32
PROMPTS = [[3, 4, 5, 3, 4, 5, 3, 9, 1, 2], [9, 8], [1, 2, 1, 2, 1, 2], [30, 31, 5]]
LENGTHS = np.asarray(list(map(len, PROMPTS)), np.int32)
SAMPLING = {"temperature": [1.0, 0.7, 1.5, 0.5], "top_k": [0, 0, 0, 2]}
SHAPES = {
    "chain": None,
    "drawn": Tree((0, 0, 1, 1, 2, 3)),
    "replacement": Tree((0, 0, 0, 1, 4), replacement=True),
    "chosen": Tree((0, 0, 1, 1, 3), chosen=True),
    "dynamic": DynamicTree(7, K, 3),
}
# Shapes in the gate. EAGLE and EAGLE-3 share all but their layer. Medusa and blockwise do, too, and
# MLP speculators whose steps are tied or not, whose layers are in `heads_test`.
GATE = {
    "dflash": ("chosen",),
    "eagle3": ("drawn",),
    "falcon": ("chain", "dynamic"),
    "spire": ("chain", "chosen"),
    "medusa": ("chain", "chosen"),
    "mlp_speculator": ("chain",),
}
# Shapes in the full suite. What all drafters share with a shape is tested with one.
MORE = {
    "dflash": ("drawn",),
    "dflash2": ("drawn", "dynamic"),
    "dspark": ("chain", "drawn"),
    "recurrent": ("chain", "drawn", "dynamic"),
    "few": ("chosen", "dynamic"),
    "eagle": ("drawn", "replacement"),
    "eagle3": ("chain", "dynamic"),
    "falcon": ("drawn",),
    "mtp": ("drawn", "dynamic"),
    "spire": ("drawn",),
    "mlp_speculator": ("drawn", "dynamic"),
    "blockwise": ("chain",),
    "narrow": ("drawn",),
    "single": ("drawn",),
    "triple": ("chain", "drawn"),
    "relative": ("chain",),
    "gemma": ("drawn",),
    "untied": ("chain",),
    "shared": ("chain",),
}
FILTERED = "medusa"  # drafts with filters, for all others: they take long to compile
# Drafters whose states differ.
COMMITS = "dflash", "eagle3", "falcon", "medusa", "sparse_self", "spire", "triple"
OPTIONS = {
    "recurrent": ("dspark", {"markov_kind": "rnn", "vocab_size": 40}),
    "few": ("dflash", {"vocab_size": 40}),
    "narrow": ("eagle3", {"norm_output": True, "norm_before_residual": True, "fc_norm": True}),
    "single": ("falcon", {"tokens_per_step": 1}),
    "triple": ("falcon", {"tokens_per_step": 3}),
    "untied": ("mlp_speculator", {"tied": False}),
    "shared": ("medusa", {"own_heads": False, "num_blocks": 2}),
}


def marked(name, *others, slow=False):
    """Returns a case of a drafter in the group that shares its programs."""
    marks = [pytest.mark.xdist_group(f"drafter {name}"), *[pytest.mark.slow] * slow]
    return pytest.param(name, *others, marks=marks)


@functools.cache
def drafter_of(name):
    """Returns a drafter of HEADS or OPTIONS, or SPiRE for a target of FAMILIES, and its weights."""
    config = tiny_config(48)
    if name in FAMILIES:
        target = target_of(name)
        drafter = drafting.head("spire", target.config, num_layers=2, recent=4)
        return drafter, drafting.random_weights(drafter, target.params)
    if name in drafting.HEADS:
        return drafting.random_head(name, config)
    if name == "sparse_self":
        return sparse_self.Drafter(config, K, sinks=2, recent=4), {}
    kind, fields = OPTIONS[name]
    drafter = drafting.head(kind, config, **fields)
    if name == "narrow":
        config = dataclasses.replace(drafter.config, d_model=16, num_heads=4)
        drafter = dataclasses.replace(drafter, config=config)
    return drafter, drafting.random_weights(drafter, drafting.target_params(48))


@functools.cache
def target_of(name):
    """Returns the target of a drafter."""
    if name in FAMILIES:
        return numpy_spread_model(48, num_layers=3, **FAMILIES[name])
    return spread_model(48)


class Drafting:
    """A drafter of features in the loop, and its distributions in training."""

    def __init__(self, name):
        self.target, (self.drafter, weights) = target_of(name), drafter_of(name)
        self.filters = name == FILTERED
        self.params = {"target": self.target.params, "drafter": weights}

    def program(self, shape, count=K) -> decode.Program:
        drafter = dataclasses.replace(self.drafter, tree=shape, num_speculative_tokens=count)
        return decode.Program(self.target.config, drafter, match.Verifier())

    def state(self, tokens, lengths) -> decode.DecodeState:
        """Returns the state after some texts, each in the first tokens of its row."""
        rows, limits = SamplingParams(**SAMPLING).rows(4), np.full(4, 26, np.int32)
        inputs = jax.device_put((rows, tokens, lengths, limits))
        prefill = compiled(decode.prompt.prefill, self.program(None), SLOTS)
        return prefill(self.params, *inputs, keys_of_rows())[0]

    def after_prompts(self) -> decode.DecodeState:
        return self.state(*padded(PROMPTS, SLOTS, seed=0))

    def propose(self, state, shape, count=K) -> Proposal:
        propose = filtered if self.filters else drafting.small_propose
        proposal, _ = compiled(propose, self.program(shape, count))(self.params, state, state.keys)
        return jax.tree.map(np.asarray, proposal)

    def logits_after(self, paths):
        """Returns logits [R, V] after paths of draft tokens, pairs of a row and tokens."""
        tokens, last = np.zeros((ROWS, WIDTH), np.int32), np.zeros(ROWS, np.int32)
        for index, (row, path) in enumerate(paths):
            text = [*PROMPTS[row], *path]
            tokens[index, : len(text)], last[index] = text, LENGTHS[row] - 2
        steps = _trained(self.drafter, self.params, tokens, last, np.unique(LENGTHS - 2))
        depths = [len(path) for _, path in paths]
        return np.asarray(steps)[np.arange(len(paths)), depths]


def filtered(program, params, state, keys) -> Proposal:
    """Returns what is proposed next with these keys, with all filters."""
    state, now = decode.step.next_round(program, params, state)
    return decode.step.propose(program, params, state, dataclasses.replace(now, keys=keys))


@functools.cache
def keys_of_rows():
    return sampling.row_keys(jax.random.key(1), 4)


@functools.partial(jax.jit, static_argnums=0)
def _trained(drafter, params, tokens, last, later):
    """Returns logits [R, K, V] of each step of the drafts that begin at indices `last`."""
    output = transformer.apply(
        drafter.target, params["target"], tokens[:, :-1], tap_layers=drafter.tap_layers
    )
    features = drafter.features(params, output)
    known = jnp.arange(features.shape[1]) <= last[:, None]
    features = jnp.where(known[..., None], features, 0)  # drafts must not see any later ones
    logits, row = [], jnp.arange(len(tokens))
    steps = drafter.unrolled(params, tokens[:, 1:], features, K, later=later)
    for step, outputs in enumerate(steps):
        index = jnp.searchsorted(later, last) if step else last
        logits.append(drafter.choices(params, outputs[row, index][:, None], step).whole()[:, 0])
    return jnp.stack(logits, axis=1)


def nodes_of(proposal):
    """Returns the tokens above each node of each row: (row, node) -> path."""
    rows = enumerate(drafting.paths(proposal, row) for row in range(len(PROMPTS)))
    return {(row, node): path for row, paths in rows for node, path in enumerate(paths)}


def check_distributions(studied, proposal):
    """Asserts that each node's distribution is the one of training after the node's path."""
    paths = nodes_of(proposal)
    nodes = [key for key, path in paths.items() if len(path) < K and has_children(proposal, *key)]
    logits = studied.logits_after([(row, paths[row, node]) for row, node in nodes])
    for (row, node), line in zip(nodes, logits, strict=True):
        options = {name: values[row] for name, values in SAMPLING.items()}
        if not studied.filters:
            options["top_k"] = 0
        expected = reference.to_probs(line, **options)
        np.testing.assert_allclose(proposal.probs[row, node], expected, atol=2e-5)


def has_children(proposal, row, node):
    return proposal.parents is None or node in proposal.parents[row]


def check_choice(studied, proposal):
    """Asserts that the children of each node are its most probable tokens, in order."""
    paths = nodes_of(proposal)
    nodes = [key for key in paths if has_children(proposal, *key)]
    logits = studied.logits_after([(row, paths[row, node]) for row, node in nodes])
    assert proposal.probs is None
    for (row, node), line in zip(nodes, logits, strict=True):
        children = np.flatnonzero(proposal.parents[row] == node)
        best = np.argsort(-line)[: len(children)]
        np.testing.assert_array_equal(proposal.tokens[row, children], best)


def check_search(studied, proposal, shape):
    """Asserts that a dynamic tree has the most probable paths of a plain search."""
    levels, scores = [{(): 0.0} for _ in PROMPTS], [{} for _ in PROMPTS]
    for _ in range(shape.depth):
        widest = [sorted(level, key=level.get)[: -shape.width - 1 : -1] for level in levels]
        paths = [(row, path) for row, some in enumerate(widest) for path in some]
        logits = studied.logits_after(paths)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        grown = [{} for _ in PROMPTS]
        for (row, path), line in zip(paths, logs, strict=True):
            for token in np.argsort(-line)[: shape.width].tolist():
                grown[row][(*path, token)] = levels[row][path] + line[token]
        levels = grown
        scores = [old | new for old, new in zip(scores, grown)]
    for row, paths in enumerate(scores):
        best = sorted(paths, key=paths.get)[: -shape.num_nodes - 1 : -1]
        drafted = [path for (r, node), path in nodes_of(proposal).items() if r == row and node]
        assert sorted(drafted) == sorted(best)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        marked(name, shape, slow=shapes is MORE)
        for shapes in (GATE, MORE)
        for name in shapes
        for shape in shapes[name]
    ],
)
def test_every_node_has_the_distribution_of_training(name, shape):
    """After its own path, behind prompts of several lengths, with filters."""
    studied, tree = Drafting(name), SHAPES[shape]
    proposal = studied.propose(studied.after_prompts(), tree)
    if shape == "dynamic":
        check_search(studied, proposal, tree)
    elif shape == "chosen":
        check_choice(studied, proposal)
    else:
        check_distributions(studied, proposal)


@pytest.mark.parametrize("name", [marked(name, slow=name == "triple") for name in COMMITS])
def test_state_after_a_path_of_a_tree_equals_a_fresh_prefill(name):
    """After paths of every length, twice. The tree and the verdict are given."""
    studied, parents = Drafting(name), SHAPES["drawn"].parents
    state = studied.after_prompts()
    rng, paths = np.random.default_rng(1), [(), (2,), (1, 4), (1, 3, 6)]
    for round_ in range(2):
        tokens = rng.integers(0, 48, (4, len(parents))).astype(np.int32)
        verdict = verdict_of(tokens, paths[round_:] + paths[:round_], rng.integers(0, 48, 4))
        state, _ = compiled(committed, studied.program(SHAPES["drawn"]))(
            studied.params, state, tokens, verdict
        )
        noise = rng.integers(0, 48, state.tokens.shape)
        known = np.arange(SLOTS) < np.asarray(state.lengths)[:, None]
        text = np.where(known, state.tokens, noise).astype(np.int32)
        again = studied.state(text, np.asarray(state.lengths))
        ours, fresh = (studied.propose(each, None) for each in (state, again))
        np.testing.assert_array_equal(ours.tokens, fresh.tokens)
        np.testing.assert_allclose(ours.probs, fresh.probs, atol=1e-4)
    assert np.asarray(state.lengths).tolist() == [13, 7, 13, 8]


def verdict_of(tokens, paths, following) -> Verdict:
    """Returns the verdict that accepts some paths, and draws the tokens `following` after them."""
    emitted, path = np.full((4, K + 1), -1, np.int32), np.full((4, K + 1), -1, np.int32)
    for row, nodes in enumerate(paths):
        emitted[row, : len(nodes)] = [tokens[row, node - 1] for node in nodes]
        emitted[row, len(nodes)] = following[row]
        path[row, : len(nodes) + 1] = 0, *nodes
    counts = np.asarray([len(nodes) + 1 for nodes in paths], np.int32)
    return Verdict(*map(jnp.asarray, (emitted, counts, path, np.ones(4, bool))))


def committed(program, params, state, tokens_BN, verdict) -> decode.DecodeState:
    """Returns the state after a given tree and verdict."""
    parents = jnp.broadcast_to(jnp.asarray(program.drafter.tree.parents), tokens_BN.shape)
    proposal = Proposal(tokens_BN, None, parents)
    state, now = decode.step.next_round(program, params, state)
    output = decode.step.score(program, params, state, proposal)
    return decode.step.commit(program, params, state, now, proposal, output, verdict)


@pytest.mark.parametrize("name", [marked(name, slow=True) for name in ("eagle3", "falcon")])
def test_a_single_token_is_drafted(name):
    """With K = 1 a drafter takes no second step."""
    studied = Drafting(name)
    state = studied.after_prompts()
    one, chain = (studied.propose(state, None, count) for count in (1, K))
    np.testing.assert_allclose(one.probs[:, 0], chain.probs[:, 0], atol=1e-6)
