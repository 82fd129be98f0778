"""Known bugs of other systems with bad values, indices, devices and inputs, one test per bug.

Docstrings name the systems that had the bug. `one_round_test` has the bugs of sampling.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import reference
from helpers.calls import assert_same_texts
from helpers.models import build_model

import spsjax
from spsjax import NonFiniteError, SamplingParams, sampling

pytestmark = pytest.mark.xdist_group("loop_test")  # the same loops: four rows, K = 3, 20 tokens


def test_inputs_are_not_modified(target, draft):
    """vllm-ascend PR#2881: the target's probabilities zeroed in place."""
    rng = np.random.default_rng(0)
    draft_probs, target_probs = rng.dirichlet(np.ones(4), (3, 2)), rng.dirichlet(np.ones(4), (3, 3))
    arrays = rng.integers(0, 4, (3, 2)), draft_probs, target_probs
    arrays = [*arrays, *map(jnp.asarray, arrays)]
    copies = [np.array(array) for array in arrays]
    spsjax.rejection_sample(jax.random.key(0), *arrays[:3])
    spsjax.rejection_sample(jax.random.key(0), *arrays[3:])
    for array, copy in zip(arrays, copies):
        np.testing.assert_array_equal(array, copy)
    prompts, leaf = [[1, 2], [3], [4], [5]], jax.tree.leaves(target.params)[0]
    before = np.array(leaf)
    spsjax.generate(target, prompts, draft, 3, max_new_tokens=20)
    assert prompts == [[1, 2], [3], [4], [5]]
    np.testing.assert_array_equal(leaf, before)


def poisoned(model, token, value):
    """Returns the model with an embedding of `token` that is not finite."""
    embedding = np.array(model.params["embed"]["embedding"])
    embedding[token] = value
    params = model.params | {"embed": {"embedding": jnp.asarray(embedding)}}
    return build_model(model.config, params, None)


MESSAGE = r"^row 2, position 5: expected finite logits, found a NaN or an infinity$"


@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("role", ("target", "draft", "target alone"))
def test_nan_in_a_context_is_an_error_with_its_position(target, draft, role, temperature, value):
    """vllm PR#21876, #53029, PR#50183, PR#41834: ids of 0, -1 or V, or repeated tokens."""
    pair = {"target": target, "draft": draft}
    pair[role.split()[0]] = poisoned(pair[role.split()[0]], 40, value)
    options = {"sampling": SamplingParams(temperature=temperature), "max_new_tokens": 20}
    draft, count = (None, None) if role == "target alone" else (pair["draft"], 3)
    with pytest.raises(NonFiniteError, match=MESSAGE):
        spsjax.generate(pair["target"], [[1], [2], [3, 40, 4, 5, 6], [7]], draft, count, **options)


def test_nan_inside_a_round_is_named_at_its_position(target):
    """Zero times NaN is NaN: the value of a masked slot would fail the nodes before it."""
    greedy = SamplingParams(temperature=0.0)
    rows = [[3], [3], [3], [3]]
    first = spsjax.generate(target, rows, sampling=greedy, max_new_tokens=20).tokens[0][0]
    bad = poisoned(target, int(first), np.nan)
    other = [9] if first != 9 else [8]
    for draft, count in ((None, None), (target, 3)):
        with pytest.raises(NonFiniteError, match=r"^row 0, position 2:"):
            spsjax.generate(bad, [[3], other, other, other], draft, count, greedy, 20)


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_rejected_draft_with_nan_scores_changes_no_token(target, draft, value):
    """A rejected draft token whose scores are not finite changes no emitted token."""
    options = {"sampling": SamplingParams(temperature=0.0), "max_new_tokens": 20}
    prompts = [[3], [9], [20, 1], [5]]
    expected = spsjax.generate(target, prompts, **options).tokens
    known = {*np.concatenate([*prompts, *expected]).tolist()}
    for token in sorted(set(range(48)) - known):
        out = spsjax.generate(poisoned(target, token, value), prompts, draft, 3, **options)
        assert_same_texts(out.tokens, expected)


def test_rejection_sample_of_nan_row_emits_no_token():
    probs = np.full((3, 3, 4), 0.25, np.float32)
    tokens = np.ones((3, 2), np.int32)
    bad = probs.copy()
    bad[1, 0] = np.nan
    # `one` is bad at another token than the draft token, and `infinite` at the draft token.
    one, infinite = probs.copy(), probs.copy()
    one[1, 0, 3], infinite[1, 0, 1] = np.nan, np.inf
    sample = spsjax.rejection_sample
    for wrong in (bad, one, infinite):
        for draft_probs, target_probs in ((wrong[:, :2], probs), (probs[:, :2], wrong)):
            for function in (sample, jax.jit(sample)):
                out, number = function(jax.random.key(0), tokens, draft_probs, target_probs)
                assert number.tolist() == [3, 0, 3] and out[1].tolist() == [-1, -1, -1]
    # The distributions at and after a missing draft token do not count, nor the target's after it.
    beyond = probs.copy()
    beyond[1, 1:] = np.nan
    missing = [[1, 1], [-1, 1], [1, 1]]
    for draft_probs, target_probs in ((bad, probs), (beyond, probs), (probs, beyond)):
        out, number = sample(jax.random.key(0), missing, draft_probs[:, :2], target_probs)
        assert number.tolist() == [3, 1, 3] and (out[1, 1:] == -1).all()


def test_large_vocabulary_overflows_no_index():
    """vLLM's test of its kernels at that size: 32-bit indices of flattened rows."""
    rows, V, count = 8, 155_136, 5
    last = np.zeros(V, np.float32)
    last[-1] = 1
    draft_probs = np.broadcast_to(last, (rows, count, V)).copy()
    target_probs = np.broadcast_to(last, (rows, count + 1, V)).copy()
    target_probs[5, 3] = np.roll(last, -1)
    tokens = np.full((rows, count), V - 1, np.int32)
    out, number = spsjax.rejection_sample(jax.random.key(0), tokens, draft_probs, target_probs)
    assert number.tolist() == [count + 1] * 5 + [4] + [count + 1] * 2
    assert out[5].tolist() == [V - 1] * 3 + [V - 2, -1, -1]
    assert (np.asarray(out)[[0, 7]] == V - 1).all()
    logits = np.random.default_rng(0).normal(size=(2, V)).astype(np.float32)
    params = SamplingParams(top_k=1000, top_p=0.9003).rows(2)
    probs = np.asarray(jax.jit(sampling.to_probs)(logits, params))
    expected = reference.to_probs(logits[1], top_k=1000, top_p=0.9003)
    np.testing.assert_allclose(probs[1], expected, atol=1e-6)
