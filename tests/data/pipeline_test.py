"""Tests of training batches: each example once per epoch, in an order fixed by the seed."""

import itertools

import jax
import numpy as np
import pytest

from spsjax import InputError
from spsjax.data import pipeline
from spsjax.parallel import sharding


def take(batches, count):
    return [jax.tree.map(np.asarray, batch) for batch in itertools.islice(batches, count)]


def table(count, width=3, start=0):
    return pipeline.Table(tokens=start + np.arange(count * width).reshape(count, width))


def iterator(tables=None, shares=(1.0,), batch=4, seed=0, mesh=None):
    where = sharding.batch_sharding(mesh)
    return pipeline.BatchIterator(tables or [table(12)], shares, batch, seed, where)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12])
def test_windows_share_one_token_and_drop_a_partial_one(length):
    windows = pipeline.TokenWindows(np.arange(40, dtype=np.uint16), length)
    assert windows[:].dtype == np.int32 and windows[:].shape == (39 // length, length + 1)
    assert windows[:][:, 1:].ravel().tolist() == list(range(1, 1 + 39 // length * length))
    assert windows[1].tolist() == windows[:][1].tolist()
    assert windows[np.asarray([2, 0])].tolist() == windows[:][[2, 0]].tolist()


def test_windows_over_too_few_tokens_are_refused():
    with pytest.raises(InputError, match=r"^train: expected at least 5 tokens, one example, found"):
        pipeline.TokenWindows(range(4), 4, "train")
    with pytest.raises(InputError, match=r"^length: expected an integer >= 1, found 0$"):
        pipeline.TokenWindows(range(4), 0)


def test_epoch_shows_each_example_once_in_its_own_order():
    epochs = np.concatenate([batch["tokens"][:, 0] // 3 for batch in take(iterator(), 9)])
    epochs = epochs.reshape(3, 12).tolist()
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    (other,) = take(iterator(batch=12, seed=1), 1)
    assert (other["tokens"][:, 0] // 3).tolist() != epochs[0]


@pytest.mark.parametrize("skipped", [0, 1, 5])
def test_restored_iterator_continues_at_the_same_batch(skipped):
    first, second = iterator(batch=5), iterator(batch=5)
    take(first, skipped)
    second.restore(first.state())
    for left, right in zip(take(first, 6), take(second, 6)):
        assert np.array_equal(left["tokens"], right["tokens"])


def test_tables_are_mixed_by_their_shares():
    tables = [table(40), table(10, start=1000)]
    batches = take(iterator(tables, (0.75, 0.25), batch=8), 10)
    rows = np.concatenate([batch["tokens"][:, 0] for batch in batches])
    assert (rows >= 1000).sum() == 20
    assert sorted(rows[rows < 1000][:40] // 3) == list(range(40))  # one epoch of the first table


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_mesh_receives_the_same_batches_in_order(shape):
    tables = [table(40), table(16, start=1000)]
    one_device = take(iterator(tables, (0.5, 0.5), batch=8), 5)
    sharded = iterator(tables, (0.5, 0.5), batch=8, mesh=sharding.mesh(*shape))
    for left, right in zip(one_device, take(sharded, 5)):
        assert np.array_equal(left["tokens"], right["tokens"])
    assert next(sharded)["tokens"].addressable_shards[0].data.shape == (8 // shape[0], 3)


def test_row_order_does_not_depend_on_the_batch_size():
    """Batches of one row alternate between tables."""
    tables = [table(40), table(10, start=1000)]
    one_by_one = take(iterator(tables, (0.75, 0.25), batch=1), 24)
    batches = take(iterator(tables, (0.75, 0.25), batch=8), 3)
    rows = [np.concatenate([batch["tokens"] for batch in taken]) for taken in (one_by_one, batches)]
    assert np.array_equal(*rows)
    alternating = take(iterator(tables, (0.5, 0.5), batch=1), 8)
    assert sum(int(batch["tokens"][0, 0] >= 1000) for batch in alternating) == 4


def test_columns_of_a_row_stay_together():
    tokens = np.arange(24).reshape(12, 2)
    both = pipeline.Table(tokens=tokens, start=tokens[:, 0] * 10)
    for batch in take(iterator([both]), 4):
        assert np.array_equal(batch["start"], batch["tokens"][:, 0] * 10)
