"""Training of an engine's drafter on texts that the engine wrote."""

from unittest import mock

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.models import nearby_model, spread_model

import spsjax
from spsjax import InputError, loading
from spsjax.runtime import pool as pool_module
from spsjax.training.online import OnlineTrainer

ROWS, K, NEW = 8, 2, 24


def engine_of(target, drafter):
    with mock.patch.object(pool_module, "row_sizes", lambda most, least: [most]):
        return spsjax.Engine(target, drafter, K, rows=ROWS, slots=64, chunk=16, stop_at_eos=False)


def texts_of(engine, seed):
    """Returns requests after they are done, and the accepted draft tokens per round."""
    requests = [engine.submit([row], max_new_tokens=NEW, seed=seed + row) for row in range(ROWS)]
    for request in requests:
        request.result()
    rounds = sum(request.rounds for request in requests)
    return requests, ROWS * NEW / rounds - 1


@pytest.mark.parametrize("name", ["draft_model", pytest.param("eagle", marks=pytest.mark.slow)])
def test_refreshed_drafter_recovers_after_the_target_changed(name):
    """While a frozen one's drafts are rejected. The engine keeps its weights until `publish`."""
    target = spread_model(48)
    other = spread_model(48, seed=9)
    engine = engine_of(target, drafting.build(name, nearby_model(target), K))
    trainer = OnlineTrainer(engine, texts=64, length=NEW, batch=8, learning_rate=3e-3)
    engine.set_weights(other.params)
    before = jax.tree.map(np.asarray, engine.drafter.params)
    for wave in range(4):
        requests, frozen = texts_of(engine, 100 * wave)
        for request in requests:
            trainer.add(request.prompt, request.tokens)
    first = trainer.learn(10)
    later = trainer.learn(150)
    assert later["loss"] < 0.9 * first["loss"]
    changed = jax.tree.map(np.array_equal, before, engine.drafter.params)
    assert all(jax.tree.leaves(changed))
    trainer.publish()
    trainer.learn(1)  # takes the trainer's own weights, not those of the engine
    assert texts_of(engine, 300)[1] > frozen + 0.1


def test_buffer_keeps_the_newest_texts_and_what_counts():
    target = spread_model(48)
    trainer = OnlineTrainer(engine_of(target, nearby_model(target)), texts=3, length=4)
    with pytest.raises(InputError, match=r"^learn: expected texts"):
        trainer.learn(1)
    trainer.add([1, 2], [3, 4, 5, 6, 7])  # two pieces: 1 2 3 4 5, and 5 6 7
    assert trainer._tokens[:2].tolist() == [[1, 2, 3, 4, 5], [5, 6, 7, 7, 7]]
    assert trainer._spans[:2].tolist() == [[2, 5], [1, 3]]
    trainer.add([9] * 100, [8])  # of a long prompt only the end
    assert trainer._spans[2].tolist() == [2, 3]
    trainer.add([1], [2])
    assert trainer.count == 3 and trainer._tokens[0].tolist() == [1, 2, 2, 2, 2]
    trainer.add([1], [])  # nothing to learn from
    trainer.add([1, 2, 3], [])
    assert trainer._next == 1
    with pytest.raises(InputError, match=r"^text: expected token ids in \[0, 48\), found 48"):
        trainer.add([1], [48])


def test_drafter_without_training_is_refused():
    target = spread_model(48)
    engine = spsjax.Engine(target, spsjax.load_drafter("suffix", target), rows=1, slots=32)
    with pytest.raises(InputError, match=r"^engine: expected a draft model or .*, found suffix"):
        OnlineTrainer(engine)
    engine = engine_of(target, loading.quantized(nearby_model(target), "int8"))
    with pytest.raises(InputError, match=r"^engine: .* that can be trained, found int8"):
        OnlineTrainer(engine)
    with pytest.raises(InputError, match=r"^length: expected an integer from 2 to 512"):
        OnlineTrainer(engine, length=513)
