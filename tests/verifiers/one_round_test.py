"""Known bugs of other systems in drawing, accepting and correcting tokens, one test per bug.

Docstrings name the systems that had the bug. `bad_values_test` has the bugs of bad values. Others
show elsewhere: drafts that are not drawn from what is reported (transformers#32867, #47932) in
`draws_test`, filters on one side or in another order (vllm#9834, sglang PR#36173) in `loop_test`.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spsjax
from spsjax import SamplingParams, sampling
from spsjax.types import Proposal
from spsjax.verifiers import rejection

K = 2
UNIFORM_MAX = 1 - 2.0**-23
to_probs = jax.jit(sampling.to_probs)


@functools.partial(jax.jit, static_argnums=0)
def _verified(uniform, proposal, target_probs):
    def chosen(keys, role, count):
        return jnp.full((len(target_probs), count), uniform, jnp.float32)

    with mock.patch.object(sampling, "uniforms", chosen):
        return rejection.rejection(None, proposal, target_probs)


def verified(uniform, tokens, draft_probs, target_probs):
    """Returns the verdict of rejection sampling where every random number is `uniform`."""
    arrays = (np.asarray(array, np.float32) for array in (draft_probs, target_probs))
    draft_probs, target_probs = arrays
    proposal = Proposal(np.asarray(tokens, np.int32), draft_probs)
    return jax.device_get(_verified(uniform, proposal, target_probs))


def test_rejection_with_zero_uniform_emits_possible_tokens():
    """sglang#35771, sglang-jax, tpu-inference, HF: `u <= ratio` holds for 0 <= 0."""
    rng = np.random.default_rng(0)
    rows, V = 256, 6
    pair = rng.dirichlet(np.ones(V), (2, rows, K + 1)) * (rng.random((2, rows, K + 1, V)) < 0.4)
    pair += 1e-3 * (np.arange(V) == 3)
    draft_probs, target_probs = (pair / pair.sum(axis=-1, keepdims=True)).astype(np.float32)
    tokens = rng.integers(0, V, (rows, K)).astype(np.int32)
    verdict = verified(0.0, tokens, draft_probs[:, :K], target_probs)
    emitted, number = verdict.tokens, verdict.num_tokens
    at_emitted = np.take_along_axis(target_probs, np.maximum(emitted, 0)[..., None], 2)[..., 0]
    assert (at_emitted[emitted >= 0] > 0).all()
    # u = 0 accepts all other tokens.
    possible = np.take_along_axis(target_probs[:, :K], tokens[..., None], 2)[..., 0] > 0
    np.testing.assert_array_equal(number - 1, np.cumprod(possible, axis=1).sum(axis=1))


def test_ratio_has_no_epsilon():
    """tpu-inference (`q + 1e-9`): rare tokens biased, and p == q sometimes rejected."""
    probs = np.tile(np.float32([0.75, 0.25 - 1e-7, 1e-7, 1e-12]), (4, 2, 1))
    tokens = np.arange(4)[:, None]
    above, below = jax.device_get(jax.jit(rejection.ratio)(tokens, probs[:, :1], probs[:, :1]))
    np.testing.assert_array_equal(above[:, 0], probs[0, 0])
    np.testing.assert_array_equal(below[:, 0], probs[0, 0])
    verdict = verified(UNIFORM_MAX, tokens, probs[:, :1], probs)
    assert verdict.num_tokens.tolist() == [2] * 4


def test_residual_of_equal_distributions_is_the_target():
    """HF, gpt-fast, toyllm, jaymody, feifeibear: 0 / 0 where the two agree."""
    target = np.float32([0.5, 0.25, 0.25, 0.0])
    np.testing.assert_array_equal(jax.jit(rejection.residual)(target, target), target)
    # After a rejection by rounding alone, the token comes from the target, with mass above zero.
    more = np.tile([0.5, 0.25, 0.25, 1e-9], (4, 1, 1))
    verdict = verified(0.999, np.full((4, 1), 3), more, np.tile(target, (4, 2, 1)))
    assert verdict.tokens.tolist() == [[2, -1]] * 4 and verdict.valid.all()


def test_residual_is_normalised_without_softmax():
    """transformers PR#28508: softmax gives tokens of zero residual a chance."""
    rows = 512
    draft_probs = np.tile([0.5, 0.5, 0.0, 0.0], (rows, 1, 1))
    target_probs = np.tile([0.5, 0.0, 0.4, 0.1], (rows, 2, 1))
    tokens, number = jax.device_get(
        spsjax.rejection_sample(
            jax.random.key(0), np.ones((rows, 1), int), draft_probs, target_probs
        )
    )
    assert (number == 1).all() and set(tokens[:, 0].tolist()) == {2, 3}
    assert abs(np.mean(tokens[:, 0] == 3) - 0.2) < 0.07


@pytest.mark.xdist_group("loop_test")  # four rows, K = 3, 20 tokens
def test_equal_seeds_repeat_and_other_seeds_differ(target, draft):
    """vllm#13196: the seed changes nothing."""
    prompts, params = [[1, 2, 1, 2]] * 4, SamplingParams(temperature=[1.0] * 4)
    runs = [
        [
            row.tolist()
            for row in spsjax.generate(target, prompts, draft, 3, params, 20, seed).tokens
        ]
        for seed in (0, 1, 0)
    ]
    assert runs[0] == runs[2] != runs[1]
    assert runs[0][0] != runs[0][1]  # rows of one prompt differ, too


def test_lenience_without_a_draft_token_changes_nothing():
    """This bug was spsjax's own."""
    logits = np.log(np.float32([[[0.45, 0.55], [0.5, 0.5]]]))
    greedy = np.asarray(to_probs(logits, SamplingParams(temperature=0.0).rows(1)))
    relax = jax.jit(rejection.relax_greedy)
    relaxed = relax(greedy, logits, np.asarray([[-1]]), np.asarray([True]), 0.5)
    np.testing.assert_array_equal(relaxed, greedy)
