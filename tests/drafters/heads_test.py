"""Drafters on the last feature alone: Medusa, blockwise parallel decoding, MLP speculator.

`head_proposals_test` shows that drafting computes what training does.
"""

import functools

import jax
import numpy as np
import pytest
import scipy.special
from helpers import drafting, reference
from helpers.models import spread_model

import spsjax
from spsjax import SamplingParams, Tree, loading
from spsjax.benchmarks import tree_planning
from spsjax.drafters import medusa, mlp_speculator
from spsjax.drafters.contrib import blockwise
from spsjax.models import transformer
from spsjax.training.feature_losses import FeatureObjective

VOCAB = 48


def features_of(*shape):
    return np.random.default_rng(1).standard_normal((*shape, 32)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def trained(drafter, params, tokens, features, steps):
    """Returns outputs and logits of each step in training."""
    outputs = list(drafter.unrolled(params, tokens, features, steps))
    return outputs, [
        drafter.choices(params, each, step).whole() for step, each in enumerate(outputs)
    ]


def numpy_of(tree):
    return jax.tree.map(np.asarray, tree)


TIED = {"tie_embeddings": True, "padded_vocab_size": 56}


@pytest.mark.parametrize(
    ("options", "own_heads"),
    [({}, True), (TIED, True), (TIED, False), ({"logit_softcap": 2.0}, True)],
)
def test_medusa_begins_as_the_targets_head(options, own_heads):
    target, x = spread_model(VOCAB, **options), features_of(2, 5)
    drafter = medusa.Drafter(target.config, num_heads=3, own_heads=own_heads)
    params = {"target": target.params, "drafter": drafting.initial_weights(drafter, target.params)}
    kernel = target.params["embed"]["embedding"][:VOCAB].T if "tie_embeddings" in options else None
    expected = x @ np.asarray(target.params["head"]["kernel"] if kernel is None else kernel)
    if "logit_softcap" in options:
        expected = 2 * np.tanh(expected / 2)
    for logits in trained(drafter, params, np.zeros((2, 5), int), x, 3)[1]:
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_medusas_heads_are_the_blocks_of_the_paper(target):
    """Head i is x + SiLU(x W + b), twice here, and a vocabulary matrix of its own."""
    drafter = medusa.Drafter(target.config, num_heads=2, num_blocks=2)
    weights = drafting.random_weights(drafter, target.params)
    x = features_of(1, 4)
    params = {"target": target.params, "drafter": weights}
    _, logits = trained(drafter, params, np.zeros((1, 4), int), x, 2)
    for index, actual in enumerate(logits):
        head, stream = numpy_of(weights["heads"][index]), x
        for block in (0, 1):
            linear = head["blocks"][block]["linear"]
            inner = stream @ linear["kernel"] + linear["bias"]
            stream = stream + inner * scipy.special.expit(inner)
        np.testing.assert_allclose(actual, stream @ head["head"]["kernel"], rtol=1e-4, atol=1e-4)


def test_blockwise_heads_are_the_layer_of_the_paper(target):
    """x + relu(x W + b) V_i + c_i, with one hidden layer for all heads."""
    drafter = blockwise.Drafter(target.config, num_heads=2, d_ff=8)
    weights = drafting.random_weights(drafter, target.params)
    x, own = features_of(1, 4), numpy_of(weights)
    hidden = np.maximum(x @ own["up"]["kernel"] + own["up"]["bias"], 0)
    params = {"target": target.params, "drafter": weights}
    outputs, _ = trained(drafter, params, np.zeros((1, 4), int), x, 2)
    for head, actual in enumerate(outputs):
        out = own["outs"][head]
        expected = x + hidden @ out["kernel"] + out["bias"]
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def speculated(weights, features, tokens, steps, tied, scale):
    """The MLP speculator in NumPy, token by token. Its norms do not take the mean away."""

    def at(name, step):
        index = min(step, 1) if tied and name == "project" else 0 if tied else step
        return numpy_of(weights["steps"][index][name])

    state, logits = np.asarray(features, float), []
    if scale:
        state = state / np.sqrt(2 * (state**2).mean(-1, keepdims=True))
    for step in range(steps):
        projected = state @ at("project", step)["kernel"]
        width, share = projected.shape[-1], 0.5 ** (1 / (2 * steps))
        weight = np.sqrt((1 - share**2) * width / 2) / share
        summed = projected + weight * at("embed", step)["embedding"][tokens[..., step]]
        norm = at("norm", step)
        summed = summed / np.sqrt((summed**2).mean(-1, keepdims=True))
        summed = summed * norm["scale"] + norm["bias"]
        state = summed * (1 + scipy.special.erf(summed / np.sqrt(2))) / 2
        logits.append(state @ at("head", step)["kernel"])
    return logits


@pytest.mark.parametrize(("tied", "scale"), [(True, True), (False, True), (True, False)])
def test_mlp_speculator_is_the_recursion_of_the_paper(target, tied, scale):
    drafter = mlp_speculator.Drafter(
        target.config, num_steps=3, width=20, tied=tied, scale_input=scale
    )
    weights = drafting.random_weights(drafter, target.params)
    params, features = {"target": target.params, "drafter": weights}, features_of(2, 6)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 6 + 2))
    read = np.stack([tokens[:, step : step + 6] for step in range(3)], axis=-1)
    expected = speculated(weights, features, read, 3, tied, scale)
    _, logits = trained(drafter, params, tokens, features, 3)
    for actual, wanted in zip(logits, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: medusa.Drafter(c, num_heads=0), "num_heads: expected an integer >= 1"),
        (lambda c: medusa.Drafter(c, 5, num_heads=4), "expected at most one for each of 4 heads"),
        (lambda c: medusa.Drafter(c, own_heads=1), "own_heads: expected True or False"),
        (lambda c: blockwise.Drafter(c, d_ff=0), "d_ff: expected an integer >= 1"),
        (lambda c: mlp_speculator.Drafter(c, tree=Tree((0, 1, 2, 3))), "each of 3 steps, found 4"),
        (lambda c: mlp_speculator.Drafter(c, width=-1), "width: expected an integer >= 1"),
        (lambda c: Tree((0,), replacement=True, chosen=True), "replacement: cannot be True"),
        (
            lambda c: medusa.Drafter(c, tree=Tree((0,) * 49, chosen=True)),
            "expected at most 48 children of a node",
        ),
    ],
)
def test_odd_sizes_are_refused(target, make, message):
    with pytest.raises(spsjax.InputError, match=message):
        make(target.config)


def test_one_head_per_batch_counts_for_all(target):
    """Which one it is depends on the texts, and all have their turn, at every index."""
    drafter, weights = drafting.random_head("blockwise", target.config)
    params, turns = {"target": target.params, "drafter": weights}, set()
    # With a decay of 0 the loss is the first head's, and so on.
    objectives = (
        FeatureObjective(steps=3, every=3, one=True),
        *(FeatureObjective(steps=count) for count in (1, 2, 3)),
    )
    for seed in range(40):
        tokens = np.random.default_rng(seed).integers(0, VOCAB, (1, 13))
        one, *parts = numpy_of(drafting.metrics_of(drafter, objectives, params, tokens))
        sums = [part["loss"][0, 4:] for part in parts]
        terms = [after - before for before, after in zip([0, *sums], sums)]
        assert set(one) == {"loss"}  # acceptance would be that of one head
        actual = one["loss"][0, 4:]
        first = np.allclose(actual, 3 * terms[0], atol=1e-4)
        (columns,) = np.nonzero(actual)
        turn = next(
            turn
            for turn, term in enumerate(terms)
            if np.allclose(actual[columns], (3 if turn == 0 else 9) * term[columns], atol=1e-3)
        )
        assert first == (turn == 0)
        turns.add((turn, 0 if turn == 0 else int(columns[0] + 4) % 3))
    assert turns == {(0, 0), *((turn, offset) for turn in (1, 2) for offset in range(3))}


def test_rates_by_rank_are_the_targets_probabilities_of_the_best_tokens(target):
    """Medusa's heads do not see the tokens between, so that the heads anywhere are an oracle."""
    drafter, weights = drafting.random_head("medusa", target.config)
    params = {"target": target.params, "drafter": weights}
    prompt, tokens = [5, 6, 7, 8, 9, 10], [11, 3, 4, 20]
    head = loading.LoadedDrafter("", drafter, weights)
    cold = {"temperature": 0.8, "top_k": 20}
    text = np.asarray([prompt + tokens])
    (rates,) = tree_planning.rank_rates(target, head, [(prompt, tokens)], SamplingParams(**cold), 3)

    @jax.jit
    def run(params, text):
        return transformer.apply(target.config, params["target"], text)

    output = run(params, text)
    _, heads = trained(drafter, params, text, output.hidden, 4)
    for depth in range(4):
        expected = []
        for index in range(len(prompt), text.size):
            best = np.argsort(-np.asarray(heads[depth])[0, index - depth - 2], kind="stable")[:3]
            probs = reference.to_probs(np.asarray(output.logits)[0, index - 1], **cold)
            expected.append(probs[best])
        np.testing.assert_allclose(rates[depth], np.mean(expected, axis=0), atol=1e-5)
