"""Rollouts: groups of samples that do not depend on the engine's rows."""

from unittest import mock

import jax
import numpy as np
import pytest
from helpers.models import build_model, nearby_model, spread_model

import spsjax
from spsjax import InputError
from spsjax.runtime import pool as pool_module

PROMPTS = [[1, 2, 3], [4], list(range(5, 25))]
NEW = 10


@pytest.fixture(scope="module")
def pair():
    target = spread_model(48)
    return target, nearby_model(target)


def engine_of(pair, rows, **options):
    with mock.patch.object(pool_module, "row_sizes", lambda most, least: [most]):
        return spsjax.Engine(
            *pair, 2, rows=rows, slots=64, chunk=16, stop_at_eos=False, **{"logprobs": 0} | options
        )


@pytest.fixture(scope="module")
def engine(pair):
    return engine_of(pair, 4)


def test_samples_do_not_depend_on_rows_and_are_all_different(pair, engine):
    few, many = (
        sorted(
            spsjax.rollout(one, PROMPTS, 3, max_new_tokens=NEW, seed=7),
            key=lambda group: group.index,
        )
        for one in (engine_of(pair, 2), engine)
    )
    texts = set()
    for group, other, prompt in zip(few, many, PROMPTS, strict=True):
        assert group.prompt == other.prompt == prompt and len(group.samples) == 3
        for sample, same in zip(group.samples, other.samples):
            assert sample.tokens.tolist() == same.tokens.tolist()
            assert sample.logprobs.raw.shape == (NEW,) and sample.text is None
            np.testing.assert_allclose(sample.logprobs.raw, same.logprobs.raw, atol=1e-4)
            assert sum(sample.accepted_histogram) == sample.rounds
            texts.add(tuple(sample.tokens))
    assert len(texts) == 9


def test_groups_come_as_they_finish_and_the_rest_is_cancelled(engine):
    groups = spsjax.rollout(engine, [[1], [2], [3], [4], [5]], 2, max_new_tokens=NEW)
    first = next(groups)
    assert first.index < 2 and engine.num_waiting + engine.num_running > 0
    groups.close()
    while engine.step():
        pass
    assert engine.num_waiting == engine.num_running == 0


def test_weights_may_change_between_groups(pair, engine):
    """The groups that follow are of the new target: greedy ones show it."""
    target, _ = pair
    other, greedy = spread_model(48, seed=3), spsjax.SamplingParams(temperature=0)
    groups = spsjax.rollout(engine, [[1], [2], [3], [4], [5]], 2, greedy, NEW)
    seen = [next(groups)]
    engine.set_weights(other.params)
    seen += list(groups)
    engine.set_weights(target.params)
    last = max(seen, key=lambda group: group.index)
    alone = spsjax.generate(other, [last.prompt], None, None, greedy, NEW, stop_at_eos=False)
    for sample in last.samples:
        assert sample.tokens.tolist() == alone.tokens[0].tolist()


def test_rollout_that_nobody_asks_is_cancelled_and_a_cut_one_raises(pair, engine):
    spsjax.rollout(engine, [[1], [2]], 3, max_new_tokens=NEW).close()
    engine.step()
    assert engine.num_waiting == engine.num_running == 0
    other = engine_of(pair, 4)
    groups = spsjax.rollout(other, [[1], [2]], 3, max_new_tokens=NEW)
    other.step()
    other.close()
    with pytest.raises(InputError, match=r"^rollout: expected samples that run to their ends"):
        next(groups)


@pytest.mark.slow
def test_mesh_gives_the_samples_of_one_device_also_after_new_weights(pair, engine):
    """New weights come from one device, or are NumPy arrays; they are split as the old ones."""
    mesh = spsjax.sharding.mesh(2, 4)
    split = engine_of([build_model(one.config, one.params, mesh) for one in pair], 4)
    other = spread_model(48, seed=3)

    def tokens(engine):
        groups = spsjax.rollout(engine, PROMPTS, 3, max_new_tokens=NEW, seed=7)
        return {group.index: [one.tokens.tolist() for one in group.samples] for group in groups}

    assert tokens(split) == tokens(engine)
    split.set_weights(jax.device_get(other.params))
    engine.set_weights(other.params)
    assert tokens(split) == tokens(engine)
    engine.set_weights(pair[0].params)


def test_what_cannot_be_rolled_out_is_refused(pair, engine):
    with pytest.raises(InputError, match=r"^engine: expected one with logprobs=0 or more"):
        spsjax.rollout(engine_of(pair, 2, logprobs=None), PROMPTS, 1)
    with pytest.raises(InputError, match=r"^engine: expected an Engine, found Model"):
        spsjax.rollout(pair[0], PROMPTS, 1)
    with pytest.raises(InputError, match=r"^samples: expected an integer"):
        spsjax.rollout(engine, PROMPTS, 0)
    with pytest.raises(InputError, match=r"^prompts\[1\]: .* within the engine's 64 slots"):
        spsjax.rollout(engine, [[1], [2] * 60], 1, max_new_tokens=NEW)
    with pytest.raises(InputError, match=r"max_new_tokens: expected integers"):
        spsjax.rollout(engine, PROMPTS, 2, max_new_tokens=-1)
    engine.step()
    assert engine.num_waiting == engine.num_running == 0
    nothing = next(spsjax.rollout(engine, [[1]], 1, max_new_tokens=0)).samples[0]
    assert nothing.tokens.size == nothing.logprobs.raw.size == 0
