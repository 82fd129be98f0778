"""Known bugs of other systems in drawing, accepting and correcting tokens, one test per bug.

Docstrings name the systems that had the bug. The tests look inside one round: at the proposal, and
at the distributions that decided on it. `bad_values_test` has the bugs of bad values.
"""

import collections
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting, reference
from helpers.g_test import SUSPICIOUS, g_test
from helpers.models import logits_of
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

import spsjax
from spsjax import SamplingParams, decode, sampling
from spsjax.types import Proposal
from spsjax.verifiers import rejection

K, ROWS, PROMPT = 2, 8192, [1, 2, 1]
MIX = ({}, {"temperature": 0.0}, {"temperature": 0.6, "top_k": 3, "top_p": 0.9003}, {"top_p": 0.7})
UNIFORM_MAX = 1 - 2.0**-23
PROMPTS = [[1, 2, 1, 2], [3, 4], [1, 2, 1, 2], [30, 31]]
to_probs = jax.jit(sampling.to_probs)
same_loop = pytest.mark.xdist_group("loop_test")  # four rows, K = 3, 20 tokens


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


@dataclasses.dataclass
class OneRound:
    """Inputs and results of one round with many rows.

    Attributes:
      tokens: draft tokens [B, K].
      draft_probs: draft distributions [B, K, V].
      target_probs: target distributions [B, K + 1, V].
      emitted: emitted tokens [B, K + 1].
      count: accepted draft tokens [B].
    """

    tokens: np.ndarray
    draft_probs: np.ndarray
    target_probs: np.ndarray
    emitted: np.ndarray
    count: np.ndarray

    def of(self, kind):
        """Returns the same for the rows that sample with MIX[kind]."""
        fields = dataclasses.asdict(self).values()
        return OneRound(*(field[kind :: len(MIX)] for field in fields))


@pytest.fixture(scope="module")
def pair():
    """A target of four tokens, and a draft that is often wrong."""
    target = numpy_spread_model(4, sharpness=1.0)
    return target, numpy_nearby_model(target, distance=0.4)


@pytest.fixture(scope="module")
def one_round(pair) -> OneRound:
    """The first round of ROWS rows of one prompt."""
    target, draft = pair
    loaded = drafting.build("draft_model", draft, K)
    program = decode.Program(target.config, loaded.drafter, rejection.Verifier())
    params = {"target": target.params, "drafter": loaded.params}
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    full = [SamplingParams(**MIX[row % len(MIX)]) for row in range(ROWS)]
    rows = SamplingParams(**{name: [getattr(p, name) for p in full] for name in names}).rows(ROWS)

    @jax.jit
    def run(keys):
        tokens = jnp.tile(jnp.asarray(PROMPT, jnp.int32), (ROWS, 1))
        lengths = jnp.full(ROWS, len(PROMPT))
        state = decode.prefill(program, 8, params, rows, tokens, lengths, lengths + 1, keys)
        seen, sample = [], rejection.rejection

        def watched(keys, proposal, target_probs, lenience):
            verdict = sample(keys, proposal, target_probs, lenience)
            seen.extend((proposal.tokens, proposal.probs, target_probs, verdict.tokens))
            seen.append(verdict.num_tokens - 1)
            return verdict

        with mock.patch.object(rejection, "rejection", watched):
            decode.step(program, params, state)
        return seen

    return OneRound(*map(np.asarray, run(sampling.row_keys(jax.random.key(0), ROWS))))


def test_draft_probs_are_the_distribution_drawn_from(one_round):
    """Draft tokens are drawn from the distribution that the drafter returns.

    transformers#32867, #47932: tokens drawn from one distribution, another one returned.
    """
    for kind in range(len(MIX)):
        rows = one_round.of(kind)
        paths = collections.Counter(map(tuple, rows.tokens.tolist()))
        # Rows with the same first token have the same distribution of the second.
        second_probs = dict(zip(rows.tokens[:, 0].tolist(), rows.draft_probs[:, 1]))
        expected = {
            (first, second): float(rows.draft_probs[0, 0, first] * second_probs[first][second])
            for first in second_probs
            for second in range(4)
        }
        expected = {path: mass for path, mass in expected.items() if mass > 0}
        assert abs(sum(expected.values()) - 1) < 1e-3
        assert g_test(paths, expected) > SUSPICIOUS, MIX[kind]
    # The distribution at half the temperature fails, so that the check can see the bug.
    rows = one_round.of(0)
    cooled = rows.draft_probs[0, 0].astype(float) ** 2
    first = collections.Counter((token,) for token in rows.tokens[:, 0].tolist())
    wrong = {(token,): mass / cooled.sum() for token, mass in enumerate(cooled)}
    assert g_test(first, wrong) < SUSPICIOUS


def test_target_and_draft_logits_pass_the_same_filters(one_round, pair):
    """Target and draft distributions are the oracle's, with the same filters in the same order.

    vllm#9834, sglang PR#36173, sglang-jax, tpu-inference: filters on one side, or reordered.
    """
    target, draft = map(logits_of, pair)
    for kind, params in enumerate(MIX):
        rows = one_round.of(kind)
        for row in range(8):
            for node in range(K + 1):
                context = [*PROMPT, *rows.tokens[row, :node].tolist()]
                expected = reference.to_probs(target(context), **params)
                np.testing.assert_allclose(rows.target_probs[row, node], expected, atol=1e-5)
                if node < K:
                    expected = reference.to_probs(draft(context), **params)
                    np.testing.assert_allclose(rows.draft_probs[row, node], expected, atol=1e-5)


def test_to_probs_applies_temperature_before_top_p():
    """The temperature is applied before the top-p filter.

    tpu-inference: filters by top-p first, so that a high temperature keeps another set.
    """
    logits = np.asarray([[3.0, 2.0, 1.0, 0.0]], np.float32)
    for temperature, kept in ((4.0, 3), (1.0, 2)):
        probs = to_probs(logits, SamplingParams(temperature, top_p=0.8).rows(1))
        assert np.count_nonzero(probs) == kept


def test_greedy_rows_have_one_token_left(one_round):
    """In a batch of sampled rows, target and draft give a greedy row's best token probability 1.

    tpu-inference: a temperature of -1 inverts the logits. vllm PR#27077: the mirror image.
    """
    rows = one_round.of(1)
    for probs in (rows.target_probs, rows.draft_probs):
        assert (np.sort(probs, axis=-1) == [0, 0, 0, 1]).all()
    assert len(np.unique(rows.emitted, axis=0)) == 1


@same_loop
def test_greedy_row_of_a_mixed_batch_is_greedy(target, draft):
    """A greedy row in a batch of sampled rows gets the greedy tokens, as above."""
    mixed = SamplingParams(temperature=[1.0, 0.0, 0.7, 0.0])
    out, greedy = (
        spsjax.generate(target, PROMPTS, draft, 3, params, 20)
        for params in (mixed, SamplingParams(temperature=0.0))
    )
    for row in (1, 3):
        np.testing.assert_array_equal(out.tokens[row], greedy.tokens[row])


def test_acceptance_rate_is_the_distributions_overlap(one_round):
    """The first draft token is accepted with the probability that both distributions share.

    vllm-ascend#13730: u = 0 accepts every token. transformers#47932: 0.728 inflated to 0.783.
    """
    for kind in range(len(MIX)):
        rows = one_round.of(kind)
        overlap = np.minimum(rows.target_probs[0, 0], rows.draft_probs[0, 0]).sum()
        error = np.sqrt(overlap * (1 - overlap) / len(rows.count)) + 1e-6
        assert abs((rows.count > 0).mean() - overlap) < 4 * error, MIX[kind]


def test_rejection_with_zero_uniform_emits_possible_tokens():
    """A uniform of zero accepts no token whose target probability is zero.

    sglang#35771, sglang-jax, tpu-inference, HF: `u <= ratio` holds for 0 <= 0.
    """
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
    """The acceptance ratio has no epsilon, so that equal distributions accept every token.

    tpu-inference (`q + 1e-9`): rare tokens biased, and p == q sometimes rejected.
    """
    probs = np.tile(np.float32([0.75, 0.25 - 1e-7, 1e-7, 1e-12]), (4, 2, 1))
    tokens = np.arange(4)[:, None]
    above, below = jax.device_get(jax.jit(rejection.ratio)(tokens, probs[:, :1], probs[:, :1]))
    np.testing.assert_array_equal(above[:, 0], probs[0, 0])
    np.testing.assert_array_equal(below[:, 0], probs[0, 0])
    verdict = verified(UNIFORM_MAX, tokens, probs[:, :1], probs)
    assert verdict.num_tokens.tolist() == [2] * 4


def test_residual_of_equal_distributions_is_the_target():
    """An empty residual falls back to the target's distribution.

    HF, gpt-fast, toyllm, jaymody, feifeibear: 0 / 0 where the two distributions agree.
    """
    target = np.float32([0.5, 0.25, 0.25, 0.0])
    np.testing.assert_array_equal(jax.jit(rejection.residual)(target, target), target)
    # After a rejection by rounding alone, the token comes from the target, with mass above zero.
    more = np.tile([0.5, 0.25, 0.25, 1e-9], (4, 1, 1))
    verdict = verified(0.999, np.full((4, 1), 3), more, np.tile(target, (4, 2, 1)))
    assert verdict.tokens.tolist() == [[2, -1]] * 4 and verdict.valid.all()


def test_residual_is_normalised_without_softmax():
    """Tokens outside the residual are never drawn.

    transformers PR#28508: softmax gives tokens of zero residual a chance.
    """
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


@same_loop
def test_equal_seeds_repeat_and_other_seeds_differ(target, draft):
    """Equal seeds give equal tokens, and other seeds or rows give other tokens.

    vllm#13196: the seed changes nothing.
    """
    prompts, params = [PROMPTS[0]] * 4, SamplingParams(temperature=[1.0] * 4)
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
    """A position without a draft token keeps its greedy distribution under lenience.

    This bug was spsjax's own.
    """
    logits = np.log(np.float32([[[0.45, 0.55], [0.5, 0.5]]]))
    greedy = np.asarray(to_probs(logits, SamplingParams(temperature=0.0).rows(1)))
    relax = jax.jit(rejection.relax_greedy)
    relaxed = relax(greedy, logits, np.asarray([[-1]]), np.asarray([True]), 0.5)
    np.testing.assert_array_equal(relaxed, greedy)
