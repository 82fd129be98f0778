"""Log-probabilities of emitted tokens against those of a fresh pass over the whole text."""

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.models import nearby_model, spread_model

import spsjax
from spsjax import InputError, SamplingParams
from spsjax import sampling as rules
from spsjax.decode.schedule import Fixed
from spsjax.models import transformer

PROMPTS = [[5, 6, 7, 8, 9], [3]]
SAMPLING = SamplingParams(temperature=[0.7, 0.0], top_p=[0.9, 1.0])
NEW = 12


@pytest.fixture(scope="module")
def target():
    return spread_model(40)


def compare(target, logprobs, prompt, tokens, sampling):
    """Compares the log-probabilities of a text with those of one pass over it, in NumPy."""
    text = np.array([[*prompt, *tokens]], np.int32)
    output = transformer.apply(target.config, target.params, text)
    logits = np.asarray(output.logits, np.float64)[:, len(prompt) - 1 : -1]
    raw = logits[0] - np.log(np.exp(logits[0]).sum(axis=-1, keepdims=True))
    at = np.arange(len(tokens)), tokens
    np.testing.assert_allclose(logprobs.raw, raw[at], atol=1e-4)
    law = np.asarray(rules.to_probs(logits.astype(np.float32), sampling.rows(1)))[0]
    np.testing.assert_allclose(logprobs.sampled, np.log(law[at]), atol=1e-4)
    np.testing.assert_array_equal(logprobs.top_ids, np.argsort(-raw, axis=-1)[:, :3])
    np.testing.assert_allclose(logprobs.top, -np.sort(-raw, axis=-1)[:, :3], atol=1e-4)


@pytest.mark.parametrize("name", ["draft_model", "random_tree", "schedule"])
def test_log_probabilities_equal_those_of_a_fresh_pass(target, name):
    """For drafted tokens and others, in rounds of all sizes, with filters and greedily."""
    near, K = nearby_model(target), 3
    drafter = near if name == "schedule" else drafting.build(name, near, K)
    K = Fixed(2) if name == "schedule" else K
    out = spsjax.generate(target, PROMPTS, drafter, K, SAMPLING, NEW, stop_at_eos=False, logprobs=3)
    assert 0 < out.stats.acceptance_rate < 1
    for row, sampling in enumerate((SamplingParams(0.7, top_p=0.9), SamplingParams(0))):
        assert len(out.logprobs[row].raw) == NEW
        compare(target, out.logprobs[row], PROMPTS[row], out.tokens[row], sampling)
    assert not np.any(out.logprobs[1].sampled)  # greedy: of probability 1


def test_engine_has_log_probabilities_of_tokens_up_to_the_end(target):
    engine = spsjax.Engine(
        target, nearby_model(target), 3, rows=2, slots=64, rounds=2, stop_at_eos=False, logprobs=3
    )
    sampling = SamplingParams(0.7, top_p=0.9)
    whole = engine.submit(PROMPTS[0], sampling, NEW)
    tokens = whole.result()
    cut = engine.submit(PROMPTS[0], sampling, NEW, stop_token_ids=[tokens[4]])
    expected = tokens[: tokens.index(tokens[4]) + 1]
    assert cut.result() == expected
    compare(target, whole.logprobs, PROMPTS[0], tokens, sampling)
    compare(target, cut.logprobs, PROMPTS[0], expected, sampling)


@pytest.mark.parametrize("value", [-1, 41, 1.5, "many"])
def test_number_of_log_probabilities_that_cannot_be_is_refused(target, value):
    with pytest.raises(InputError, match=r"^logprobs: expected an integer"):
        spsjax.generate(target, PROMPTS, logprobs=value)


def test_without_log_probabilities_none_are_kept(target):
    program = spsjax.Engine(target, rows=1, slots=32)
    request = program.submit([1], max_new_tokens=1)
    assert request.result() and request.logprobs is None
    assert spsjax.generate(target, [[1]], max_new_tokens=1).logprobs is None
    assert not jax.tree.leaves(program._pool.state.logprobs)
