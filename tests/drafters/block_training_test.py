"""What block drafters are trained on, by hand: the context of each anchor, labels and losses."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import scipy.special
from helpers import block_reference, drafting

from spsjax.models import transformer
from spsjax.training import anchors
from spsjax.training.feature_losses import FeatureObjective

VOCAB, T, STEPS = 48, 9, 3
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, T + 1)).astype(np.int32)
FIELDS = {
    "dflash": {"block_size": 4},
    "dflash2": {"block_size": 4, "selector_top_k": 3},
    "dspark": {"block_size": 3, "markov_kind": "gated"},
}
OBJECTIVES = {
    "all": FeatureObjective(steps=STEPS, decay=0.5, own=0.7),
    "drawn": FeatureObjective(steps=STEPS, decay=0.5, own=0.7, anchors=4),
    "paced": FeatureObjective(steps=STEPS, pace=0.4, divergence="best_token", anchors=4),
}
drawn = jax.jit(anchors.drawn, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_target(config, layers, params, tokens):
    output = transformer.apply(config, params, tokens[:, :-1], tap_layers=layers)
    return output.taps, output.logits


def softmax(line):
    return scipy.special.softmax(line.astype(float))


class ByHand:
    """Losses of drafts of TOKENS, one draft at a time."""

    def __init__(self, name, config, params):
        self.name = name
        drafter = drafting.head(name, config, **FIELDS[name])
        layer = dataclasses.replace(drafter.config, num_layers=1)
        self.drafter = dataclasses.replace(drafter, config=layer)
        self.weights = jax.tree.map(np.asarray, drafting.random_weights(self.drafter))
        self.params = {"target": params, "drafter": self.weights}
        taps, self.targets = run_target(config, self.drafter.tap_layers, params, TOKENS)
        self.taps = np.concatenate(taps, axis=-1).astype(float)
        self.missing = set()  # whether labels were no candidates

    def draft(self, row, index, hard):
        """Returns the loss, the loss of the drafter's own, and the confidence of each step."""
        target, text, weights = self.params["target"], TOKENS[row], self.weights
        around = block_reference.convolved if self.name == "dflash2" else block_reference.plain
        embedding, context = np.asarray(target["embed"]["embedding"]), self.taps[row, : index + 1]
        outputs = block_reference.outputs(
            self.drafter, weights, embedding, context, text[index + 1], around
        )
        lines = block_reference.logits(self.drafter, np.asarray(target["head"]["kernel"]), outputs)
        outputs = outputs[1 - self.drafter.anchor_drafts :]
        for step in range(min(STEPS, T - 1 - index)):
            previous, line, output = text[index + 1 + step], lines[step], outputs[step]
            wanted, own = np.asarray(self.targets[row, index + 1 + step], float), 0.0
            if self.name == "dspark":
                line = block_reference.markov(weights["markov_head"], line, output, previous)
                overlap = np.minimum(softmax(wanted), softmax(line)).sum()
                own = block_reference.confidence_loss(weights, output, previous, overlap)
            if self.name == "dflash2":
                selector, label = weights["candidate_selector"], wanted.argmax()
                own = block_reference.selector_loss(
                    self.drafter, selector, line, output, previous, softmax(wanted), hard
                )
                self.missing.add(label not in np.argsort(-line)[: self.drafter.selector_top_k])
            yield softmax(wanted), softmax(line), own

    def losses(self, objective, rows):
        """Returns the loss [2, T] of an objective, from indices and weights of drafts per row."""
        result = np.zeros((2, T))
        for row, drafts in enumerate(rows):
            for index, weight in drafts:
                steps = list(self.draft(row, index, objective.divergence == "best_token"))
                confidences = np.asarray([draft[target.argmax()] for target, draft, _ in steps])
                factors = objective.decay ** np.arange(len(steps))
                if objective.pace:
                    factors = block_reference.pace(confidences, objective.pace)
                for step, (target, draft, own) in enumerate(steps):
                    loss = (target * np.log(target / draft)).sum()
                    if objective.divergence == "best_token":
                        loss = -np.log(confidences[step])
                    term = loss + objective.own * own
                    result[row, index + 1 + step] += weight * factors[step] * term
        return result


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dflash", "paced"),
        ("dflash2", "drawn"),
        ("dspark", "all"),
        *(pytest.param(name, "paced", marks=pytest.mark.slow) for name in ("dflash2", "dspark")),
    ],
)
def test_losses_of_blocks_are_those_of_the_papers(target, name, kind):
    """Of blocks at all tokens, and at drawn ones, which count for others, too."""
    hand, objective = ByHand(name, target.config, target.params), OBJECTIVES[kind]
    (found,) = drafting.metrics_of(hand.drafter, (objective,), hand.params, TOKENS)
    rows = [[(index, 1.0) for index in range(T)]] * 2
    if objective.anchors:
        index, weight = map(np.asarray, drawn({"tokens": TOKENS}, objective.anchors, STEPS))
        rows = [[*zip(*row)] for row in zip(index.tolist(), weight.tolist())]
    expected = hand.losses(objective, rows)
    np.testing.assert_allclose(found["loss"], expected, rtol=2e-4, atol=2e-4)
    assert name != "dflash2" or hand.missing == {True, False}


def test_label_of_the_confidence_has_no_gradient(target):
    """Else the draft would be made worse, to make its confidence right."""
    hand = ByHand("dspark", target.config, target.params)
    rng = np.random.default_rng(1)
    outputs = rng.standard_normal((1, 4, target.config.d_model + 6)).astype(np.float32)
    logs = np.log(softmax(rng.standard_normal((1, 4, VOCAB)))).astype(np.float32)

    @jax.jit
    def gradient(weights):
        def own(weights):
            params = hand.params | {"drafter": weights}
            return hand.drafter.learned(params, outputs, logs).own.sum()

        return jax.grad(own)(weights)

    found = gradient(hand.weights)
    assert np.abs(found["confidence_head"]["proj"]["kernel"]).max() > 1e-3
    assert np.abs(found["markov_head"]["markov_w2"]["kernel"]).max() == 0
