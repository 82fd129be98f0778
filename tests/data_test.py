"""The split never changes, and training sees every token once an epoch, resumed or not."""

import itertools

import numpy as np
import pytest

from spsjax import data


class Letters:
    """A tokenizer of one id a character."""

    bos_id, eos_id = 1, 2

    def encode(self, text):
        return [self.bos_id, *map(ord, text)]


def take(batches, count):
    return list(itertools.islice(batches, count))


def test_the_held_out_files_are_fixed():
    names = [
        "abc.py",
        "argparse.py",
        "codecs.py",
        "email/header.py",
        "heapq.py",
        "json/decoder.py",
        "os.py",
        "typing.py",
    ]
    names += [f"module_{index}.py" for index in range(60)]
    assert [name for name in names if data.is_held_out(name)] == [
        "codecs.py",
        "email/header.py",
        "module_3.py",
        "module_21.py",
        "module_31.py",
        "module_53.py",
        "module_56.py",
    ]


def test_the_split_is_disjoint_and_complete_and_knows_nothing_but_the_name():
    texts = {f"module_{index}.py": str(index) for index in range(2000)}
    training, held_out = data.split(texts)
    assert not training.keys() & held_out.keys()
    assert training | held_out == texts
    assert 60 < len(held_out) < 140  # one in 20
    some = dict(list(texts.items())[::3])
    assert data.split(some)[1].keys() == held_out.keys() & some.keys()


def test_the_standard_library_is_read_without_its_tests():
    texts = data.stdlib()
    assert "argparse.py" in texts and "json/decoder.py" in texts
    assert "def heappush" in texts["heapq.py"]
    assert not any("test" in name.split("/") for name in texts)
    assert list(texts) == sorted(texts, key=lambda name: name.split("/"))
    assert all(data.split(texts))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12])
def test_every_token_is_a_label_once(length):
    texts = ["abcde", "", "fghij", "k"]
    stream = [token for text in texts for token in [1, *map(ord, text), 2]]
    examples = data.pack(texts, Letters(), length)
    assert examples.shape == ((len(stream) - 1) // length, length + 1)
    assert examples.dtype == np.int32
    labels = examples[:, 1:].ravel().tolist()
    assert labels == stream[1 : 1 + len(labels)]
    assert len(stream) - 1 - len(labels) < length  # only a last, partial window is left out
    assert (examples[:, :-1].ravel().tolist()) == stream[: len(labels)]


def test_an_epoch_shows_each_example_once_in_an_order_of_its_own():
    examples = np.arange(12)[:, None]
    epochs = np.asarray(take(data.batches(examples, 3, seed=0), 12)).reshape(3, 12)
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    other = np.asarray(take(data.batches(examples, 3, seed=1), 4)).ravel()
    assert other.tolist() != epochs[0].tolist()


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 11])
def test_starting_later_is_continuing(start):
    examples = np.arange(13)[:, None]  # the 13th is left out of each epoch of 4 batches
    everything = take(data.batches(examples, 3, seed=0), 16)
    assert np.array_equal(take(data.batches(examples, 3, seed=0, start=start), 5),
                          everything[start : start + 5])  # fmt: skip


def test_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="at most 2 examples, found 3"):
        next(data.batches(np.zeros((2, 5), np.int32), 3, seed=0))
